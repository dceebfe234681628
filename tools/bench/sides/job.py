"""What a side of a comparison is told to do, and what it gives back: two records, passed as JSON files.

A side is a program of this folder, run by `running.py` as a process of its own, so that its memory and its bytes are
its own. Whether two results may be compared is `judging.py`'s business. Nothing here imports torch or a side's library.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Sleep:
    """Layers that sleep instead of computing: see `sleeping.py`."""

    num_layers: int
    layer_elements: int
    """Weights of a layer, a multiple of 64."""
    forward_seconds: float
    """Of a layer and a micro-batch."""
    backward_seconds: float
    """Beside the forward that it repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What all sides of a comparison do alike. Equal works give equal losses."""

    model: str
    """A Hugging Face directory with config.json and model.safetensors: the weights that training begins with."""
    tokens: str
    """A one-dimensional .npy of ids. Row r of micro-batch m of step s is window (s*M + m)*B + r, and its labels."""
    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    num_steps: int
    """Steps, the first of which warms up and is not counted; all losses are compared."""
    sleep: Sleep | None = None
    """The model's layers are replaced by ones that sleep; None: they compute."""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    """Largest norm of a step's gradients; 0: they are not clipped."""
    dtype: str = "float32"
    activation_checkpointing: bool = True
    """Layers are computed again in the backward."""
    num_threads: int = 1
    """torch's, within an operation."""
    attention: str = "sdpa"
    """Its implementation, as transformers names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of one side."""

    work: Work
    directory: str
    """On the drive; empty, and the side's alone. States go below it."""
    options: dict[str, Any] = field(default_factory=dict)
    """What this side alone has: its budget, its knobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """What a side did. Bytes are the kernel's counts for its process, never its own."""

    name: str
    work: Work
    """As it was applied: read back from the side's own objects where they say it."""
    options: dict[str, Any]
    versions: dict[str, str]
    """Of the packages that decide a result."""
    losses: list[float]
    """Of every step: the mean over its counted labels."""
    step_seconds: list[float]
    """Of every step, the first included."""
    read_bytes: list[int]
    """From the drive, of every step."""
    written_bytes: list[int]
    """To the drive, of every step."""
    least_read_bytes: int = 0
    """What it must have read in all its steps, as far as it knows: less means that a cache has answered."""
    cached_bytes: int
    """Of the side's files on the drive, what was in the page cache after the last step."""
    stored_bytes: int
    """Of the side's files on the drive, all."""
    startup_seconds: float
    """From the process's start to its first step."""
    save_seconds: float | None
    """Until a checkpoint after the last step is durable; None: it cannot."""
    save_refused: str | None = None
    """Why not."""
    baseline_bytes: int
    """Anonymous and shared resident memory after imports and a first tiny step of torch."""
    peak_bytes: int
    """Most of it since, until the last step has ended: a checkpoint is not yet saved."""
    trained_loss: float | None = None
    """Of the first step's ids once more, after all updates; None: not looked at."""
    layer_calls: int | None = None
    """Forwards and backwards that slept in all steps; None where layers compute."""
    details: dict[str, Any] = field(default_factory=dict)
    """What this side alone can tell, as JSON has it: busy and stalled seconds per lane. Nothing is decided by it."""

    @property
    def median_step_seconds(self) -> float:
        """Of the counted steps: all but the first."""
        return statistics.median(self.step_seconds[1:])


def write_job(job: Job, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(job)))


def read_job(path: Path) -> Job:
    """What :func:`write_job` wrote."""
    found = json.loads(path.read_text())
    return Job(work=_work(found["work"]), directory=found["directory"], options=found["options"])


def write_result(result: SideResult, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(result)))


def read_result(path: Path) -> SideResult:
    """What :func:`write_result` wrote."""
    found = json.loads(path.read_text())
    return SideResult(**(found | {"work": _work(found["work"])}))


def versions(*names: str) -> dict[str, str]:
    """Of installed packages."""
    return {name: importlib.metadata.version(name) for name in names}


def _work(found: dict[str, Any]) -> Work:
    sleep = Sleep(**found["sleep"]) if found["sleep"] else None
    return Work(**(found | {"sleep": sleep, "betas": tuple(found["betas"])}))
