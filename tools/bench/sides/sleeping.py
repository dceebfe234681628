"""A model whose layers sleep instead of computing, as a processor's would that waits for an accelerator.

Time passes and no processor is used; weights, gradients and updates are real. Needs torch and transformers alone, so
that every side of a comparison can train it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hoist.tools.bench.sides.job import Sleep


def sleeping_config(sleep: Sleep, *, hidden: int, vocab: int) -> LlamaConfig:
    """A small Llama with as many layers, which :func:`let_layers_sleep` replaces."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=sleep.num_layers,
        num_attention_heads=1,
        intermediate_size=hidden,
        tie_word_embeddings=False,
    )


def let_layers_sleep(model: PreTrainedModel, sleep: Sleep, *, device: str | None = "meta") -> None:
    """Replace every decoder layer by a :class:`SleepingLayer` on ``device``; None: where torch makes tensors now."""
    layers = model.get_submodule("model.layers")
    if not isinstance(layers, nn.ModuleList):
        raise TypeError(f"model.layers is a {type(layers).__name__}")
    for number in range(sleep.num_layers):
        layers[number] = SleepingLayer(sleep, model.config.hidden_size, device=device)


class _Clock:
    """When a layer's backward on one micro-batch began."""

    def __init__(self) -> None:
        self.started = 0.0


class _Begin(torch.autograd.Function):
    """Stands at a layer's output, where its backward begins."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        ctx.clock.started = time.perf_counter()
        return gradients[0], None


class _End(torch.autograd.Function):
    """Stands at a layer's input, where its backward ends: sleeps for what is left of the layer's time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, clock: _Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        _sleep_until(ctx.clock.started + ctx.seconds)
        return gradients[0], None, None


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class SleepingLayer(GradientCheckpointingLayer):
    """A decoder layer with many weights, of which a few take part: real gradients that cost little.

    Its forward and its backward take a given time, whatever torch itself needs of it, as long as that is less.
    transformers' activation checkpointing, where it is on, runs its forward again in the backward.
    """

    def __init__(self, sleep: Sleep, hidden: int, *, device: str | None = "meta") -> None:
        super().__init__()
        self.table = nn.Embedding(sleep.layer_elements // hidden, hidden, device=device)
        self._forward_seconds = sleep.forward_seconds
        self._backward_seconds = sleep.backward_seconds

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        started = time.perf_counter()
        clock = _Clock()
        rows = torch.arange(hidden_states.shape[1]) % self.table.num_embeddings
        entered = _End.apply(hidden_states, clock, self._backward_seconds)  # type: ignore[no-untyped-call]  # torch
        output: Tensor = _Begin.apply(entered + self.table(rows), clock)  # type: ignore[no-untyped-call]  # torch
        _sleep_until(started + self._forward_seconds)
        return output
