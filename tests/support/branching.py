"""A layer with a branch that is used in some steps only, a parameter that never is, and gradients that can be spoilt.

The same module stands in the reference and in hoist's model (`training.py`'s ``alter`` and ``before_step``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.training import BeforeStep

#: Names of the parameters that :func:`with_branch` adds.
BRANCH, NEVER = "model.layers.1.mlp.branch.weight", "model.layers.1.mlp.never"


class Branching(nn.Module):
    """An MLP with a branch that is used only while ``active``, and a parameter without any use."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.branch = nn.Linear(64, 400, bias=False)  # 25600 elements: whole chunks of 4096
        self.never = nn.Parameter(torch.ones(3 * 4096 + 7))
        self.active = True
        #: What the gradient of its output is multiplied with; 1: left alone.
        self.spoilt = 1.0
        with torch.no_grad():
            self.branch.weight.copy_(torch.linspace(-0.1, 0.1, 25600).view(400, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden)
        if self.active:
            result = result + self.branch(hidden).sin().sum(-1, keepdim=True)
        if self.spoilt != 1.0 and result.requires_grad:
            factor = self.spoilt
            result.register_hook(lambda gradient: gradient * factor)
        return result


def with_branch(model: PreTrainedModel) -> None:
    """Give the second layer's MLP a branch."""
    layer = model.get_decoder().layers[1]
    layer.mlp = Branching(layer.mlp)


def even_steps_only(model: PreTrainedModel, step: int) -> None:
    """Use the branch in every other step."""
    model.get_decoder().layers[1].mlp.active = step % 2 == 0


def spoiling(factors: Mapping[int, float]) -> BeforeStep:
    """Multiply gradients in some steps, by the steps' numbers; inf and NaN make them so. The loss stays what it is."""

    def spoil(model: PreTrainedModel, step: int) -> None:
        even_steps_only(model, step)
        model.get_decoder().layers[1].mlp.spoilt = factors.get(step, 1.0)

    return spoil
