"""The loss in slices of a micro-batch's tokens: that of whole logits within rounding, and its gradients; nothing else.

Which heads allow it is found on the model; those that do not are run whole. Memory: tests/scheduler/test_workspace.py
and tests/test_memory_promise.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CohereConfig, GraniteConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler import workspace
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.context import Context
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.head_loss import SLICE_BYTES, HeadLoss, parts, slice_tokens
from hoist.scheduler.models import build_model
from hoist.scheduler.stages import StagedModel, split
from tests.support.models import FAMILIES, HIDDEN, VOCAB_SIZE, reference_model, tiny_config
from tests.support.training import (
    Engine,
    Recipe,
    assert_identical,
    make_steps,
    same_bits,
    torch_threads,
    train,
    train_reference,
)

NO_CONTEXT = Context(tensors=(), calls=())
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
#: Heads that do something to their logits, and experts before them.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: tiny_config("llama"),
    "opt": lambda: tiny_config("opt", tied=True),
    "gemma2 caps": lambda: tiny_config("gemma2", tied=True),
    "cohere scales": lambda: CohereConfig(**_SHAPE, logit_scale=0.25),
    "granite divides": lambda: GraniteConfig(**_SHAPE, logits_scaling=3.0),
    "mixtral": lambda: tiny_config("mixtral"),
    "qwen3 experts": lambda: Qwen3MoeConfig(**_SHAPE, num_experts=4, moe_intermediate_size=32),
}
ROWS, TOKENS = 3, 11


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# ---------------------------------------------------------------------- the cut


@given(rows=st.integers(1, 9), tokens=st.integers(1, 40), limit=st.integers(1, 100))
def test_parts_are_all_tokens_once_in_order_and_nearly_equal(rows: int, tokens: int, limit: int) -> None:
    micro_batch = torch.arange(rows * tokens).view(rows, tokens)
    cut = [part.of(micro_batch) for part in parts(rows, tokens, limit)]
    assert torch.equal(torch.cat([part.reshape(-1) for part in cut]), micro_batch.view(-1))
    assert all(part.is_contiguous() for part in cut)
    sizes = sorted(part.numel() for part in cut)
    assert sizes[-1] <= limit
    assert sizes[-1] - sizes[0] <= (1 if tokens > limit else tokens)
    assert (len(cut) == 1) == (rows * tokens <= limit)


def test_a_slice_has_32_mib_of_logits_or_a_quarter_of_the_width() -> None:
    assert slice_tokens(151_936, 64) == SLICE_BYTES // (4 * 151_936) == 55
    assert slice_tokens(151_936, 1024) == 256
    assert slice_tokens(2**25, 2) == 1


# ---------------------------------------------------------------------- equal to the whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    loss: Tensor
    gradients: dict[str, Tensor]
    """By name of the weight, and of the hidden state."""


def labels_with_holes() -> Tensor:
    """One row without any counted label; in another, a stretch longer than the shorter slices."""
    labels = torch.randint(3, VOCAB_SIZE, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    labels[1] = -100
    labels[2, 2:9] = -100
    return labels


def head_of(staged: StagedModel, *, dtype: torch.dtype = torch.float32) -> None:
    """Bind the head to random weights; the norm's are near 1."""
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Tensor] = {}
    for name in [*(spec.name for spec in staged.head.tensors), *staged.head.borrowed]:
        shape = staged.tensor(name)[1].shape
        values[name] = (torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)).to(dtype)
    staged.head.bind(values)


def run(staged: StagedModel, limit: int, *, dtype: torch.dtype = torch.float32) -> Result:
    head_of(staged, dtype=dtype)
    hidden = torch.randn((ROWS, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2)).to(dtype)
    labels = labels_with_holes()
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    loss = HeadLoss(staged.head, slice_tokens=limit).train(
        hidden, batch, NO_CONTEXT, 17, mode=nullcontext(), backward=torch.autograd.backward
    )
    gradients = {"hidden": hidden}
    for name, parameter in staged.head.parameters().items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    staged.head.unbind(forget=True)
    return Result(loss=loss, gradients=gradients)


@pytest.mark.parametrize("limit", [1, 4, 7, 11, 25])
@pytest.mark.parametrize("family", CONFIGS)
def test_slices_equal_the_whole_within_rounding(family: str, limit: int) -> None:
    """To 1e-6 of the largest, and about as near to the truth in float64 as the whole is."""
    staged = split(build_model(CONFIGS[family]()))
    sliced, whole = run(staged, limit), run(staged, ROWS * TOKENS)
    exact = run(split(build_model(CONFIGS[family](), dtype=torch.float64)), ROWS * TOKENS, dtype=torch.float64)
    torch.testing.assert_close(sliced.loss, whole.loss, rtol=1e-6, atol=0.0)
    assert sliced.loss.dtype == torch.float32
    for name, truth in exact.gradients.items():
        scale = float(truth.abs().max())
        error = float((sliced.gradients[name] - truth).abs().max()) / scale
        error_of_whole = float((whole.gradients[name] - truth).abs().max()) / scale
        assert error <= max(2 * error_of_whole, 1e-6), name
        torch.testing.assert_close(sliced.gradients[name], whole.gradients[name], rtol=0.0, atol=1e-6 * scale)
    assert bool((sliced.gradients["hidden"][1] == 0).all())


@pytest.mark.parametrize("family", [*FAMILIES, *list(CONFIGS)[2:]])
def test_one_slice_is_bit_for_bit_the_head_s_own_loss(family: str) -> None:
    config = CONFIGS[family]() if family in CONFIGS else tiny_config(family)
    staged = split(build_model(config))
    assert staged.head.token_wise_width == VOCAB_SIZE
    got = run(staged, ROWS * TOKENS)
    head_of(staged)
    hidden = torch.randn((ROWS, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = labels_with_holes()
    loss = staged.head.forward(hidden, {"input_ids": labels.clamp(min=0), "labels": labels}, NO_CONTEXT, 17)
    torch.autograd.backward(loss)
    assert torch.equal(got.loss, loss)
    expected: dict[str, Tensor | None] = {name: value.grad for name, value in staged.head.parameters().items()}
    for name, gradient in (expected | {"hidden": hidden.grad}).items():
        assert gradient is not None
        assert same_bits(got.gradients[name], gradient), name


@pytest.mark.parametrize("limit", [4, ROWS * TOKENS])
def test_a_micro_batch_without_a_counted_label_has_no_loss_and_no_gradient(limit: int) -> None:
    staged = split(build_model(tiny_config("llama")))
    head_of(staged)
    hidden = torch.randn((2, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
    ids = torch.ones((2, TOKENS), dtype=torch.int64)
    loss = HeadLoss(staged.head, slice_tokens=limit).train(
        hidden,
        {"input_ids": ids, "labels": torch.full_like(ids, -100)},
        NO_CONTEXT,
        5,
        mode=nullcontext(),
        backward=torch.autograd.backward,
    )
    assert float(loss) == 0.0
    assert not hidden.any()
    for parameter in staged.head.parameters().values():
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("limit", [1, 4, 25, ROWS * TOKENS])
def test_evaluation_is_the_same_loss_and_keeps_everything(limit: int) -> None:
    staged = split(build_model(tiny_config("gemma2")))
    expected = run(staged, limit).loss
    head_of(staged)
    hidden = torch.randn((ROWS, TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
    before = hidden.clone()
    labels = labels_with_holes()
    total = HeadLoss(staged.head, slice_tokens=limit).evaluate(
        hidden, {"input_ids": labels.clamp(min=0), "labels": labels}, Context(tensors=(), calls=()), 17
    )
    assert (total.dtype, total.requires_grad) == (torch.float32, False)
    assert float(total) == float(expected)
    assert torch.equal(hidden, before)
    assert all(parameter.grad is None for parameter in staged.head.parameters().values())


# ---------------------------------------------------------------------- heads that allow no slices


class Averaging(nn.Linear):
    """Looks at all tokens before its own."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source.cumsum(1))


class Next(nn.Linear):
    """Looks at one other token."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source.roll(-1, dims=1))


class Positional(nn.Linear):
    """Depends on where a token is."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source) * torch.arange(1.0, source.shape[1] + 1)[:, None]


class AcrossRows(nn.Linear):
    """Normalises over the rows of a micro-batch."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(source - source.mean(0, keepdim=True))


class Dropping(nn.Linear):
    """Has dropout of its own."""

    def forward(self, source: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(source, 0.5))


def with_head(kind: type[nn.Linear]) -> PreTrainedModel:
    model = build_model(tiny_config("llama"))
    old = model.get_output_embeddings()
    with torch.device("meta"):
        new = kind(HIDDEN, VOCAB_SIZE, bias=False)
    new.weight = old.weight
    model.set_output_embeddings(new)
    return model


@pytest.mark.parametrize("kind", [Averaging, Next, Positional, AcrossRows, Dropping])
def test_a_head_that_is_not_token_wise_is_run_whole(kind: type[nn.Linear]) -> None:
    staged = split(with_head(kind))
    assert staged.head.token_wise_width == 0
    assert len(HeadLoss(staged.head, slice_tokens=4).parts(torch.empty(3, 50, HIDDEN))) == 1


def test_a_loss_that_shifts_labels_itself_is_run_whole() -> None:
    model = build_model(tiny_config("llama"))

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: float, **_others: object) -> Tensor:
        flat = logits[:, :-1].reshape(-1, vocab_size)
        return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch

    model.loss_function = loss
    assert split(model).head.token_wise_width == 0


def test_whole_logits_that_are_large_are_told(caplog: pytest.LogCaptureFixture) -> None:
    staged = split(with_head(Next))
    ids = torch.zeros((2, 9_000), dtype=torch.int64)
    with caplog.at_level(logging.WARNING):
        workspace.measure(staged, {"input_ids": ids[:, :64], "labels": ids[:, :64]})
        assert not caplog.records
        workspace.measure(staged, {"input_ids": ids, "labels": ids})
    (record,) = caplog.records
    assert "all logits of a micro-batch exist at once: 35 MiB" in record.getMessage()


# ---------------------------------------------------------------------- through the trainer


def test_training_in_slices_is_near_the_plain_loop_and_the_same_for_any_budget(tmp_path: Path) -> None:
    config, recipe = tiny_config("qwen3", tied=True), Recipe()
    steps = make_steps(3, 2)
    expected = train_reference(config, steps, recipe)
    outcomes = [
        train(tmp_path / str(factor), config, steps, recipe, Engine(budget_factor=factor, loss_slice_tokens=5))
        for factor in (1.0, 20.0)
    ]
    assert_identical(outcomes[0], outcomes[1])
    assert outcomes[0].losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in expected.states.weights.items():
        torch.testing.assert_close(outcomes[0].states.weights[name], weight, rtol=0.0, atol=2e-4)


def test_smaller_slices_need_less_workspace_down_to_what_layers_need() -> None:
    staged = split(build_model(tiny_config("llama")))
    ids = torch.zeros((2, 64), dtype=torch.int64)
    needs = [
        workspace.measure(staged, {"input_ids": ids, "labels": ids}, loss_slice_tokens=limit).stages[-1]
        for limit in (128, 64, 32, 16)
    ]
    assert all(0.45 <= smaller / larger <= 0.60 for larger, smaller in pairwise(needs))


@pytest.mark.parametrize("value", [-1, 2.5, None])
def test_a_slice_is_a_number_of_tokens(value: Any) -> None:
    recipe = Recipe()
    with pytest.raises(ConfigError, match=r"^loss_slice_tokens: "):
        TrainerConfig(
            host_memory_bytes=1,
            micro_batch_size=1,
            seq_len=2,
            num_micro_batches=1,
            optimizer=recipe.hyperparameters,
            schedule=recipe.schedule,
            loss_slice_tokens=value,
        )


def test_the_model_in_memory_has_the_head_that_was_tried() -> None:
    """The probe leaves weights absent and the model as it was."""
    staged = split(build_model(tiny_config("gemma2")))
    assert all(bool(parameter.isnan().all()) for parameter in staged.model.parameters())
    assert staged.model.training
    names = dict(reference_model(tiny_config("gemma2"), attention="eager").named_parameters()).keys()
    assert dict(staged.model.named_parameters()).keys() == names
