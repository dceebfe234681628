"""A model whose layers sleep instead of computing, as a processor's would that waits for an accelerator.

Time passes and no processor is used; weights, gradients and updates are real. Needs torch and transformers alone, so
that every side of a comparison can train it, from equal weights: :func:`write_checkpoint`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hoist.tools.bench.sides.job import Sleep

#: Of the model around the layers. Small: all that it computes counts as the step's, and nothing of it sleeps.
HIDDEN, VOCAB = 64, 512
#: Standard deviation of initial weights, Llama's.
_DEVIATION = 0.02


def sleeping_config(sleep: Sleep, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> LlamaConfig:
    """A small Llama with as many layers, which :func:`let_layers_sleep` replaces."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=sleep.num_layers,
        num_attention_heads=1,
        intermediate_size=hidden,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What layers took since they were last asked. One call: a forward or a backward on one micro-batch."""

    num_calls: int
    num_late: int
    """Calls in which torch, or what a side does within it, needed longer than the layer should have taken."""
    seconds: float
    """In all calls together: what was asked for, late calls' excess, and what a sleep runs over."""
    most_late_seconds: float
    """Most that one call was late."""


class Watch:
    """Keeps the time of a model's layers. For one thread at a time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._num_calls = self._num_late = 0
        self._seconds = self._most_late_seconds = 0.0

    def sleep(self, started: float, seconds: float) -> None:
        """Return ``seconds`` after ``started``, or at once if that has passed; note which."""
        late = time.perf_counter() - (started + seconds)
        if late < 0.0:
            time.sleep(-late)
        elif seconds > 0.0:
            self._num_late += 1
            self._most_late_seconds = max(self._most_late_seconds, late)
        self._num_calls += 1
        self._seconds += time.perf_counter() - started

    def take(self) -> Spent:
        """What was spent since the last call of this."""
        spent = Spent(
            num_calls=self._num_calls,
            num_late=self._num_late,
            seconds=self._seconds,
            most_late_seconds=self._most_late_seconds,
        )
        self.forget()
        return spent


def let_layers_sleep(model: PreTrainedModel, sleep: Sleep, *, device: str | None = "meta") -> Watch:
    """Replace every decoder layer by a :class:`SleepingLayer` with uninitialised weights on ``device``; None: where
    torch makes tensors now.

    Returns what keeps their time.
    """
    layers = model.get_submodule("model.layers")
    if not isinstance(layers, nn.ModuleList):
        raise TypeError(f"model.layers is a {type(layers).__name__}")
    watch = Watch()
    for number in range(sleep.num_layers):
        layers[number] = SleepingLayer(sleep, model.config.hidden_size, watch, device=device)
    return watch


def initial_weight(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """float32, of a tensor of a sleeping model: depends on name, shape and seed alone."""
    if name.endswith("norm.weight"):
        return torch.ones(*shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(*shape).normal_(0.0, _DEVIATION, generator=generator)


def weight_shapes(sleep: Sleep, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """Every weight of a sleeping model, by its name in the state dict."""
    layers = {f"model.layers.{number}.weight": (sleep.layer_elements // hidden, hidden)
              for number in range(sleep.num_layers)}  # fmt: skip
    ends = {"lm_head.weight": (vocab, hidden), "model.embed_tokens.weight": (vocab, hidden)}
    return {**ends, **layers, "model.norm.weight": (hidden,)}


def write_checkpoint(
    directory: Path, sleep: Sleep, *, hidden: int = HIDDEN, vocab: int = VOCAB, seed: int = 0
) -> None:
    """config.json and model.safetensors, float32, of a sleeping model: the same bytes for the same arguments.

    All weights are in memory at once. ``directory`` must exist; what is there is replaced.
    """
    shapes = weight_shapes(sleep, hidden=hidden, vocab=vocab)
    weights = {name: initial_weight(name, shape, seed) for name, shape in shapes.items()}
    sleeping_config(sleep, hidden=hidden, vocab=vocab).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


class _Began:
    """When a layer's backward on one micro-batch began."""

    __slots__ = ("moment",)

    def __init__(self) -> None:
        self.moment = math.nan


class _Begin(torch.autograd.Function):
    """Stands at a layer's output, where its backward begins.

    Saves a tensor, the layer's last: activation checkpointing computes a layer again up to the last one that was saved,
    when the first is asked for, so all of the layer's forward is repeated here, before its backward begins.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, began: _Began) -> Tensor:
        ctx.began = began
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        ctx.began.moment = time.perf_counter()
        return gradients[0], None


class _End(torch.autograd.Function):
    """Stands at a layer's input, where its backward ends: sleeps for what is left of the layer's time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, began: _Began, watch: Watch, seconds: float) -> Tensor:
        ctx.began, ctx.watch, ctx.seconds = began, watch, seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        ctx.watch.sleep(ctx.began.moment, ctx.seconds)
        return gradients[0], None, None, None


class SleepingLayer(GradientCheckpointingLayer):
    """A decoder layer with many weights, of which a few take part: real gradients that cost little.

    Its forward and its backward take a given time, whatever torch itself needs of it, as long as that is less. The
    weight is the layer's own, so that hooks of a module that fetch and release it stand before and after that time:
    weights that come late cannot hide in it, on any side. The gradient is handed over within it, as what an accelerator
    would do beside the processor.
    """

    def __init__(self, sleep: Sleep, hidden: int, watch: Watch, *, device: str | None = "meta") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sleep.layer_elements // hidden, hidden, device=device))
        self._watch = watch
        self._forward_seconds = sleep.forward_seconds
        self._backward_seconds = sleep.backward_seconds

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        started = time.perf_counter()
        began = _Began()
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device) % self.weight.shape[0]
        # Autograd goes back through what was made last first: the weight's gradient comes before the end.
        entered = _End.apply(hidden_states, began, self._watch, self._backward_seconds)  # type: ignore[no-untyped-call]  # torch
        added = entered + nn.functional.embedding(rows, self.weight)
        self._watch.sleep(started, self._forward_seconds)
        output: Tensor = _Begin.apply(added, began)  # type: ignore[no-untyped-call]  # torch
        return output
