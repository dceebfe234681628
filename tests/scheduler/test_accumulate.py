"""Gradients that go straight into a buffer, block by block, have the bits of autograd's own accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hoist.scheduler.accumulate import DirectGradients, Target, add_to, block_elements, row_cuts
from tests.support.training import same_bits, torch_threads

#: Weight shapes: one block, a block that is no multiple of 64 rows, several blocks with and without a remainder.
SHAPES = [(1, 1), (3, 5), (503, 64), (4097, 129), (8192, 64), (4097, 1031)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@dataclass(kw_only=True, slots=True)
class Result:
    """What some micro-batches gave."""

    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    weight_gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    bias_gradient: Tensor | None = None


class Buffer:
    """A gradient buffer that holds garbage before the first gradient, and the mode that fills it."""

    def __init__(self, weight: Tensor) -> None:
        self.values = torch.full(weight.shape, torch.nan)
        self._filled = False
        block = torch.full((block_elements(weight.shape),), torch.nan, dtype=weight.dtype)
        self.mode = DirectGradients({weight: Target(self.values, self._touched)}, block)

    def _touched(self) -> bool:
        before, self._filled = self._filled, True
        return before


Call = Callable[[Tensor, nn.Parameter, nn.Parameter | None], Tensor]


def run(
    call: Call,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    *,
    direct: bool,
) -> Result:
    """Micro-batches one after another; ``upstream`` None: the gradient of the sum, which is an expanded scalar.

    A bfloat16 weight's gradients, without ``direct``, are what autograd makes of each, added in float32.
    """
    result = Result()
    parameter = nn.Parameter(weight.clone())
    offset = None if bias is None else nn.Parameter(bias.clone())
    buffer = Buffer(parameter)
    total: Tensor | None = None
    for source, gradient in zip(inputs, upstream, strict=True):
        if source.is_floating_point():
            source = source.detach().requires_grad_()
        if direct:
            with buffer.mode:
                output = call(source, parameter, offset)
        else:
            output = call(source, parameter, offset)
        if gradient is None:
            torch.autograd.backward(output.sum())
        else:
            torch.autograd.backward(output, gradient)
        result.outputs.append(output.detach())
        result.input_gradients.append(source.grad)
        if weight.dtype is not torch.float32 and parameter.grad is not None:
            total = parameter.grad.float() if total is None else total + parameter.grad.float()
            parameter.grad = None
    if direct:
        assert parameter.grad is None
        result.weight_gradient = buffer.values
    else:
        found = parameter.grad if total is None else total
        assert found is not None
        result.weight_gradient = found
    result.bias_gradient = None if offset is None else offset.grad
    return result


def assert_same(got: Result, expected: Result) -> None:
    assert same_bits(got.weight_gradient, expected.weight_gradient)
    pairs = [*zip(got.outputs, expected.outputs, strict=True)]
    pairs += [
        (mine, theirs)
        for mine, theirs in zip(got.input_gradients, expected.input_gradients, strict=True)
        if mine is not None and theirs is not None
    ]
    if got.bias_gradient is not None and expected.bias_gradient is not None:
        pairs.append((got.bias_gradient, expected.bias_gradient))
    assert all(same_bits(mine.float(), theirs.float()) for mine, theirs in pairs)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(source: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
    return functional.linear(source, weight, bias) if bias is not None else functional.linear(source, weight)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("leading", [(1,), (64,), (2, 12), (3, 43)])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int], leading: tuple[int, ...], with_bias: bool) -> None:
    rows, columns = shape
    weight, bias = random(rows, columns, seed=1), random(rows, seed=2) if with_bias else None
    inputs = [random(*leading, columns, seed=3 + n) for n in range(3)]
    upstream = [random(*leading, rows, seed=6 + n) for n in range(3)]
    got, expected = (run(linear, weight, bias, inputs, upstream, direct=direct) for direct in (True, False))
    assert_same(got, expected)
    assert (got.bias_gradient is None) == (expected.bias_gradient is None) == (not with_bias)


@pytest.mark.parametrize("shape", [(503, 64), (4097, 1031), (8192, 1024)])
def test_linear_on_two_threads(shape: tuple[int, int]) -> None:
    with torch_threads(2):
        test_linear(shape, (2, 12), True)


@pytest.mark.parametrize("shape", [(503, 64), (4097, 1031)])
def test_linear_with_strided_inputs_and_expanded_gradients(shape: tuple[int, int]) -> None:
    rows, columns = shape
    inputs = [random(columns, 2, 9, seed=n).permute(1, 2, 0) for n in range(2)]
    upstream = [None, random(rows, 2, 9, seed=5).permute(1, 2, 0)]
    weight, bias = random(rows, columns, seed=1), random(rows, seed=2)
    got, expected = (run(linear, weight, bias, inputs, upstream, direct=direct) for direct in (True, False))
    assert_same(got, expected)


@pytest.mark.parametrize("padding", [None, 0, 5, -1])
@pytest.mark.parametrize("shape", [(503, 64), (4097, 129)])
def test_embedding_with_repeated_tokens(shape: tuple[int, int], padding: int | None) -> None:
    def embedding(indices: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        return functional.embedding(indices, weight, padding_idx=padding)

    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    common = torch.tensor([0, 5, rows - 1]).repeat(2, 3)
    inputs = [
        torch.cat([torch.randint(0, limit, (2, 40), generator=generator), common], dim=1) for limit in (11, rows, 2)
    ]
    upstream = [random(2, 49, columns, seed=n) for n in range(3)]
    weight = random(rows, columns, seed=9)
    got, expected = (run(embedding, weight, None, inputs, upstream, direct=direct) for direct in (True, False))
    assert_same(got, expected)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(5, 3), (503, 64), (2053, 1031)])
def test_bfloat16_gradients_are_rounded_as_autograds_and_added_in_float32(
    shape: tuple[int, int], num_threads: int
) -> None:
    """Of several blocks too; what stays small would be lost in a sum in bfloat16."""
    rows, columns = shape
    weight, bias = (random(*size, seed=1).bfloat16() for size in (shape, (rows,)))
    inputs = [random(2, 3, columns, seed=3 + n).bfloat16() for n in range(3)]
    upstream = [random(2, 3, rows, seed=6 + n).bfloat16() * 10.0 ** (-3 * n) for n in range(3)]
    with torch_threads(num_threads):
        got, expected = (run(linear, weight, bias, inputs, upstream, direct=direct) for direct in (True, False))
    assert got.weight_gradient.dtype is torch.float32
    assert_same(got, expected)
    assert not torch.equal(got.weight_gradient, got.weight_gradient.bfloat16().float())


def test_bfloat16_embeddings() -> None:
    def embedding(indices: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        return functional.embedding(indices, weight, padding_idx=5)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randint(0, limit, (2, 40), generator=generator) for limit in (11, 503, 2)]
    upstream = [random(2, 40, 64, seed=n).bfloat16() for n in range(3)]
    weight = random(503, 64, seed=9).bfloat16()
    got, expected = (run(embedding, weight, None, inputs, upstream, direct=direct) for direct in (True, False))
    assert_same(got, expected)


@pytest.mark.parametrize("shape", [(), (7,), (70_000,), (3, 50_000), (300, 5, 70)])
def test_sums_of_any_shape(shape: tuple[int, ...]) -> None:
    """Those that are added in parts, and those that are not."""
    total, gradient = random(*shape, seed=1), random(*shape, seed=2).bfloat16()
    expected = total + gradient.float()
    add_to(total, gradient)
    assert torch.equal(total, expected)


def test_a_module_calls_what_is_caught() -> None:
    """torch.nn's own modules, as models use them, end up in the buffer; a weight that is not known does not."""
    layer, table, other = nn.Linear(8, 4), nn.Embedding(10, 8, padding_idx=3), nn.Linear(4, 4)
    weight_buffer, table_buffer = Buffer(layer.weight), Buffer(table.weight)
    with weight_buffer.mode, table_buffer.mode:
        output = other(layer(table(torch.tensor([[1, 3, 1]]))))
    torch.autograd.backward(output.sum())
    assert layer.weight.grad is None
    assert table.weight.grad is None
    assert other.weight.grad is not None
    assert layer.bias.grad is not None
    assert not weight_buffer.values.isnan().any()
    assert not table_buffer.values.isnan().any()
    assert not table_buffer.values[3].any()


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_with_other_rules_stay_autograds(option: dict[str, float | bool]) -> None:
    table = nn.Parameter(random(10, 4, seed=0))
    buffer = Buffer(table)
    indices = torch.tensor([1, 2, 2])
    # max_norm renormalises the table in place, which a leaf allows only outside of autograd's sight
    with torch.no_grad() if "max_norm" in option else torch.enable_grad(), buffer.mode:
        output = functional.embedding(indices, table, **option)  # type: ignore[arg-type]  # one option of either type
    if output.requires_grad:
        torch.autograd.backward(output.sum())
        assert table.grad is not None
    assert bool(buffer.values.isnan().all())


@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096), (10_000, 4096), (256, 10**6), (0, 4)])
def test_cuts_cover_all_rows_in_blocks_of_64(shape: tuple[int, int]) -> None:
    cuts = row_cuts(*shape)
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert cuts[-1][1] == shape[0]
    assert all(start % 64 == 0 for start, _ in cuts)
    assert block_elements(shape) == max(stop - start for start, stop in cuts) * shape[1]


def test_no_block_for_what_is_not_a_matrix() -> None:
    assert block_elements((7,)) == block_elements(()) == block_elements((2, 3, 4)) == 0
