"""What the parts of `python -m hoist.tools.bench.gpu` are given, and what they give: sizes, a request, rows.

What each part does is its own; in which order, and in which processes, is `gpu.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import Dtype, Order, TrainerConfig
from hoist.tiers.device import Device
from hoist.tools.bench.turns import NEVER

#: Makes the device that computes; whoever calls it closes it. Can be pickled: parts have processes of their own.
MakeDevice = Callable[[], Device]
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama, untied, and what it is trained on."""

    hidden: int
    layers: int
    intermediate: int
    vocab: int
    seq_len: int
    rows: int
    """Of a micro-batch."""
    num_micro_batches: int
    dtype: Dtype = "float32"
    head_width: int = 64

    @property
    def config(self) -> LlamaConfig:
        """The model's."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // self.head_width,
            intermediate_size=self.intermediate,
            max_position_embeddings=max(2048, self.seq_len),
            tie_word_embeddings=False,
        )

    @property
    def num_parameters(self) -> int:
        """All of them."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.seq_len * self.rows * self.num_micro_batches

    def save(self, directory: Path) -> Path:
        """Make a Hugging Face directory without weights; it may be there already."""
        self.config.save_pretrained(directory)
        return directory

    def step(self, number: int) -> list[dict[str, torch.Tensor]]:
        """The micro-batches of a step: random ids, the same for the same number; they differ in how many count."""
        generator = torch.Generator().manual_seed(1000 + number)
        step = []
        for micro_batch in range(self.num_micro_batches):
            ids = torch.randint(0, self.vocab, (self.rows, self.seq_len), generator=generator)
            labels = ids.clone()
            labels[0, : 2 + micro_batch % 4] = -100
            step.append({"input_ids": ids, "labels": labels})
        return step

    def trainer_config(self, **settings: Any) -> TrainerConfig:
        """A trainer's, with ``host_memory_bytes`` and further fields: no commits of itself, no status documents."""
        told: dict[str, Any] = {
            "dtype": self.dtype,
            "micro_batch_size": self.rows,
            "seq_len": self.seq_len,
            "num_micro_batches": self.num_micro_batches,
            "optimizer": ADAMW,
            "schedule": Schedule(kind="constant", lr=ADAMW.lr, num_steps=NEVER),
            "commit_every": NEVER,
            "status_seconds": 0.0,
        }
        return TrainerConfig(**{**told, **settings})


#: What is trained with.
ADAMW = AdamWHyperparameters(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large everything is."""

    tiny: Shape
    """Compared bit by bit with a plain loop."""
    ways: tuple[tuple[Order, float], ...]
    """In which plans and delays."""
    middle: Shape
    """Whose budgets are tried, and what is killed."""
    whole: Shape
    """Whose steps are timed."""
    host_memory_bytes: tuple[int, int]
    """Budgets of the steps that are timed: everything on the drive, and what keeps all states in memory."""
    device_memory_bytes: int | None
    """Budget of what is compared and killed, and without which a device is told nothing; None: what is free there."""
    copied_bytes: int
    """Of a copy over the bus that is timed."""
    matrix: int
    """Rows and columns of the product that is timed."""


#: The shape that ZeRO-Infinity was measured with, see `speed.py`.
WHOLE = Shape(
    hidden=2048, layers=20, intermediate=5632, vocab=32000, seq_len=1024, rows=4, num_micro_batches=16,
    dtype="bfloat16",
)  # fmt: skip
_TINY = Shape(
    hidden=64, layers=2, intermediate=192, vocab=500, seq_len=16, rows=2, num_micro_batches=3, head_width=16
)
LARGE = Scale(
    tiny=Shape(
        hidden=256, layers=3, intermediate=704, vocab=1000, seq_len=64, rows=2, num_micro_batches=3, head_width=32
    ),
    ways=(("vertical", 0.0), ("vertical", 0.5), ("horizontal", 0.0), ("horizontal", 0.5)),
    middle=Shape(
        hidden=1024, layers=8, intermediate=2816, vocab=16000, seq_len=1024, rows=4, num_micro_batches=4,
        dtype="bfloat16",
    ),
    whole=WHOLE,
    host_memory_bytes=(4 * GIB, 28 * GIB),
    device_memory_bytes=None,
    copied_bytes=256 * 2**20,
    matrix=8192,
)  # fmt: skip
SMALL = Scale(
    tiny=_TINY,
    ways=(("vertical", 0.5), ("horizontal", 0.0)),
    middle=_TINY,
    whole=_TINY,
    host_memory_bytes=(4 * 2**20, 256 * 2**20),
    device_memory_bytes=GIB,
    copied_bytes=2**20,
    matrix=256,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be done, and where."""

    directory: Path
    """On the drive. Every part makes folders of its own there; the one of the timed store is shared."""
    scale: Scale
    io: str = "auto"
    """Engine of all parts but those that time others."""
    peak_flops: float | None = None
    """The device's, in the dtype that is timed; None: looked up or measured."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that earlier parts have found, by name."""

    def device_budget(self, device: Device) -> int | None:
        """What a run is told of the device's memory."""
        return self.scale.device_memory_bytes if device.is_separate else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that a part has found."""

    what: str
    """What was looked at."""
    found: str
    """In words, with units."""
    ok: bool | None = None
    """What must hold does; None: nothing has to, or it could not be looked at."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: each with its unit in its name. Later parts get them, too."""


#: A part of the work. It gives its rows as it finds them, so that those of a part that is stopped are not lost.
Part = Callable[[Request, MakeDevice], Iterator[Row]]


def shown_share(value: float) -> str:
    """A relative difference, in few letters."""
    return "none" if value == 0.0 else f"{value:.1e}"
