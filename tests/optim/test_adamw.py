"""PieceUpdater gives torch.optim.AdamW's numbers: the fused one's bit for bit, the default one's within rounding.

Tensors are packed as a stage packs them (starts on multiples of 64), cut into pieces and updated for several steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hoist.optim import (
    MAX_ADAM_STEP,
    SPLIT_BLOCK_ELEMENTS,
    AdamWHyperparameters,
    HyperparameterError,
    PieceReport,
    PieceUpdater,
    Schedule,
    SegmentUpdate,
    UpdateScratch,
    decay_for,
    merge,
    split,
)
from hoist.optim.adamw import _runs
from hoist.optim.split import make_nans_canonical

BETAS = (0.9, 0.95)
EPS = 1e-8
ODD_SHAPES: tuple[tuple[int, ...], ...] = (
    (7,), (3, 5), (), (1,), (2, 3, 5), (64,), (129,), (5000,), (33, 65), (2,), (3,)
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny kernels are many times slower on two threads of a busy machine; one test tries other numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hyperparameters(lr: float = 1e-3, weight_decay: float = 0.0) -> AdamWHyperparameters:
    return AdamWHyperparameters(lr=lr, betas=BETAS, eps=EPS, weight_decay=weight_decay)


class Stage:
    """Tensors packed into one array with split weights and moments, updated piece by piece. Padding holds rubbish."""

    def __init__(self, tensors: Sequence[Tensor], *, block_elements: int = SPLIT_BLOCK_ELEMENTS) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        self.spans: list[tuple[int, int]] = []
        end = 0
        for tensor in tensors:
            start = -(-end // 64) * 64
            end = start + tensor.numel()
            self.spans.append((start, end))
        self.num_used = end
        self.num_elements = -(-end // 4096) * 4096
        generator = torch.Generator().manual_seed(99)
        rubbish = torch.randint(0, 2**32, (4, self.num_elements), generator=generator).to(torch.int32)
        self.hi = rubbish[0].to(torch.int16).view(torch.uint16)
        self.lo = rubbish[1].to(torch.int16)
        self.exp_avg = rubbish[2].view(torch.float32)
        self.exp_avg_sq = rubbish[3].view(torch.float32)
        for tensor, (start, stop) in zip(tensors, self.spans, strict=True):
            split(tensor.reshape(-1), self.hi[start:stop], self.lo[start:stop])
            self.exp_avg[start:stop] = 0.0
            self.exp_avg_sq[start:stop] = 0.0
        self.steps = [0] * len(tensors)
        self.updater = PieceUpdater(hyperparameters(), block_elements=block_elements)

    def step(
        self,
        gradients: Sequence[Tensor | None],
        *,
        lr: float,
        weight_decay: float | Sequence[float],
        piece_elements: int | None = None,
        whole: bool = False,
    ) -> list[PieceReport]:
        """One optimizer step; a gradient of None leaves its tensor alone.

        ``whole``: from float32 weights as they are when loaded, and with rubbish in their halves.
        """
        weights = None
        if whole:
            weights = torch.empty(self.num_elements)
            merge(self.hi, self.lo, weights)
            for half in (self.hi, self.lo):
                half.view(torch.int16).fill_(0x5A5A)
        decays = [weight_decay] * len(gradients) if isinstance(weight_decay, float) else list(weight_decay)
        packed = torch.full((self.num_used,), math.nan)  # what no tensor owns must never be used
        for index, ((start, stop), gradient) in enumerate(zip(self.spans, gradients, strict=True)):
            if gradient is not None:
                packed[start:stop] = gradient.reshape(-1)
                self.steps[index] += 1
        reports = []
        width = piece_elements or self.num_elements
        for begin in range(0, self.num_elements, width):
            end = min(begin + width, self.num_elements)
            segments = [
                SegmentUpdate(
                    start=max(start, begin) - begin,
                    stop=min(stop, end) - begin,
                    adam_step=self.steps[index],
                    lr=lr,
                    weight_decay=decays[index],
                )
                for index, (start, stop) in enumerate(self.spans)
                if gradients[index] is not None and max(start, begin) < min(stop, end)
            ]
            reports.append(
                self.updater.update(
                    weight_hi=self.hi[begin:end],
                    weight_lo=self.lo[begin:end],
                    exp_avg=self.exp_avg[begin:end],
                    exp_avg_sq=self.exp_avg_sq[begin:end],
                    gradient=packed[begin:end],
                    segments=segments,
                    weights=None if weights is None else weights[begin:end],
                )
            )
        if weights is not None:  # they must go on as what was stored of them
            merged = torch.empty(self.num_elements)
            merge(self.hi, self.lo, merged)
            assert torch.equal(weights.view(torch.int32), merged.view(torch.int32))
        return reports

    def tensor(self, index: int) -> Tensor:
        start, stop = self.spans[index]
        out = torch.empty(stop - start)
        merge(self.hi[start:stop], self.lo[start:stop], out)
        return out.view(self.shapes[index])

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        start, stop = self.spans[index]
        shape = self.shapes[index]
        return self.exp_avg[start:stop].view(shape), self.exp_avg_sq[start:stop].view(shape)

    def bits(self) -> Tensor:
        """Every bit of the stage, one column an element."""
        whole = [array.view(torch.int32) for array in (self.exp_avg, self.exp_avg_sq)]
        return torch.stack([self.hi.view(torch.int16).int(), self.lo.int(), *whole])

    def padding(self) -> Tensor:
        """True for each element that no tensor owns."""
        mask = torch.ones(self.num_elements, dtype=torch.bool)
        for start, stop in self.spans:
            mask[start:stop] = False
        return mask


class Reference:
    """The same tensors under torch.optim.AdamW."""

    def __init__(self, tensors: Sequence[Tensor], *, fused: bool, weight_decay: float | Sequence[float] = 0.0) -> None:
        decays = [weight_decay] * len(tensors) if isinstance(weight_decay, float) else list(weight_decay)
        self.parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
        groups = [{"params": [p], "weight_decay": wd} for p, wd in zip(self.parameters, decays, strict=True)]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, fused=fused)

    def step(self, gradients: Sequence[Tensor | None], *, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()

    def tensor(self, index: int) -> Tensor:
        return self.parameters[index].detach()

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[self.parameters[index]]
        return state["exp_avg"], state["exp_avg_sq"]


def draw(shapes: Sequence[Sequence[int]], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator) * scale for shape in shapes]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, except that any NaN is like any other."""
    numbers = ~theirs.isnan()
    return torch.equal(~ours.isnan(), numbers) and torch.equal(
        ours[numbers].view(torch.int32), theirs[numbers].view(torch.int32)
    )


def assert_same_bits(stage: Stage, reference: Reference, touched: Sequence[bool] | None = None) -> None:
    for index in range(len(stage.shapes)):
        assert same(stage.tensor(index), reference.tensor(index)), f"weight {index} {stage.shapes[index]}"
        if touched is None or touched[index]:
            for name, ours, theirs in zip(
                ("exp_avg", "exp_avg_sq"), stage.moments(index), reference.moments(index), strict=True
            ):
                assert same(ours, theirs), f"{name} {index} {stage.shapes[index]}"


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("lr", [1e-4, 0.1])
def test_twenty_steps_against_torch(weight_decay: float, lr: float) -> None:
    """Odd and even shapes in one stage. Fused: bit for bit, moments too. Default: to 1e-6."""
    tensors = draw(ODD_SHAPES, seed=0)
    stage = Stage(tensors)
    fused = Reference(tensors, fused=True, weight_decay=weight_decay)
    default = Reference(tensors, fused=False, weight_decay=weight_decay)
    before, padding = stage.bits(), stage.padding()
    for step in range(1, 21):
        gradients = draw(ODD_SHAPES, seed=step, scale=10.0 ** (step % 5 - 3))
        stage.step(gradients, lr=lr, weight_decay=weight_decay)
        fused.step(gradients, lr=lr)
        default.step(gradients, lr=lr)
        assert_same_bits(stage, fused)
        for index in range(len(tensors)):
            torch.testing.assert_close(stage.tensor(index), default.tensor(index), rtol=1e-6, atol=1e-6)
    assert torch.equal(stage.bits()[:, padding], before[:, padding])
    assert not any(torch.equal(stage.tensor(index), tensors[index]) for index in range(len(tensors)))


def test_more_than_one_block() -> None:
    shapes = ((2 * SPLIT_BLOCK_ELEMENTS + 77,), (1001, 3))
    tensors = draw(shapes, seed=0)
    stage, fused = Stage(tensors), Reference(tensors, fused=True, weight_decay=0.1)
    for step in range(1, 4):
        gradients = draw(shapes, seed=step)
        stage.step(gradients, lr=1e-2, weight_decay=0.1)
        fused.step(gradients, lr=1e-2)
    assert_same_bits(stage, fused)


@pytest.mark.parametrize("block_elements", [64, 192, 4096, SPLIT_BLOCK_ELEMENTS])
@pytest.mark.parametrize("piece_elements", [4096, 3 * 4096, None])
def test_any_cut_gives_the_same_bits(block_elements: int, piece_elements: int | None) -> None:
    shapes = ((9973,), (64, 130), (7,), (40, 41))
    tensors = draw(shapes, seed=0)
    stage = Stage(tensors, block_elements=block_elements)
    fused = Reference(tensors, fused=True, weight_decay=0.1)
    for step in range(1, 4):
        gradients = draw(shapes, seed=step)
        stage.step(gradients, lr=1e-2, weight_decay=0.1, piece_elements=piece_elements)
        fused.step(gradients, lr=1e-2)
    assert_same_bits(stage, fused)


@given(
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=6),
    blocks=st.integers(1, 80),
    pieces=st.integers(1, 4),
    touched=st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(deadline=None, max_examples=40)
def test_any_sizes_cuts_and_touched_tensors(sizes: list[int], blocks: int, pieces: int, touched: list[bool]) -> None:
    """Two steps, the first for all tensors, the second for some: the others keep every bit, and so does the padding."""
    tensors = draw([(size,) for size in sizes], seed=0)
    stage = Stage(tensors, block_elements=64 * blocks)
    fused = Reference(tensors, fused=True, weight_decay=0.1)
    before, padding = stage.bits(), stage.padding()
    for step, some in ((1, [True] * 6), (2, touched)):
        drawn = draw([(size,) for size in sizes], seed=step)
        gradients = [gradient if some[index] else None for index, gradient in enumerate(drawn)]
        stage.step(gradients, lr=1e-2, weight_decay=0.1, piece_elements=4096 * pieces)
        fused.step(gradients, lr=1e-2)
    assert_same_bits(stage, fused)
    assert torch.equal(stage.bits()[:, padding], before[:, padding])


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    blocks=st.integers(1, 80),
    pieces=st.integers(1, 4),
    touched=st.lists(st.booleans(), min_size=6, max_size=6),
    wild=st.lists(st.sampled_from((math.nan, math.inf, -math.inf, 1e38)), max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_loaded_weights_give_the_bits_of_halves(
    sizes: list[int], blocks: int, pieces: int, touched: list[bool], wild: list[float]
) -> None:
    """Whatever was in the halves: gaps, untouched tensors, whole pieces without segments, NaN and infinities too."""
    tensors = draw([(size,) for size in sizes], seed=0)
    stages = [Stage(tensors, block_elements=64 * blocks) for _ in range(2)]
    for step, some in ((1, [True] * 6), (2, touched)):
        drawn = draw([(size,) for size in sizes], seed=step)
        for position, value in enumerate(wild):
            drawn[position % len(sizes)][(7 * position) % sizes[position % len(sizes)]] = value
        gradients = [gradient if some[index] else None for index, gradient in enumerate(drawn)]
        reports = [
            stage.step(gradients, lr=1e-2, weight_decay=0.1, piece_elements=4096 * pieces, whole=whole)
            for stage, whole in zip(stages, (False, True), strict=True)
        ]
        assert reports[0] == reports[1]
        assert torch.equal(stages[0].bits(), stages[1].bits())


def test_loaded_weights_in_more_than_one_block() -> None:
    """Segments that differ in rate and decay, an untouched tensor as large as a block between them."""
    shapes = ((SPLIT_BLOCK_ELEMENTS + 77,), (SPLIT_BLOCK_ELEMENTS,), (1001, 3))
    stages = [Stage(draw(shapes, seed=0)) for _ in range(2)]
    gradients: list[Tensor | None] = [*draw(shapes, seed=1)]
    gradients[1] = None
    for stage, whole in zip(stages, (False, True), strict=True):
        stage.step(gradients, lr=1e-2, weight_decay=[0.1, 0.0, 0.5], whole=whole)
    assert torch.equal(stages[0].bits(), stages[1].bits())


def test_halves_of_loaded_weights_need_no_segments() -> None:
    stage = Stage(draw(((100,),), seed=0))
    before = stage.bits()
    assert stage.step([None], lr=0.1, weight_decay=0.1, whole=True) == [PieceReport(num_elements=0, learning_rates=())]
    assert torch.equal(stage.bits(), before)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(64), "weights must have weight_hi's 128 elements, got 64"),
        (torch.zeros(128, dtype=torch.bfloat16), "weights must be torch.float32, got torch.bfloat16"),
        (torch.zeros(256)[::2], "weights must be flat, contiguous and on the CPU"),
    ],
)
def test_wrong_loaded_weights_are_refused(weights: Tensor, message: str) -> None:
    floats = {name: torch.zeros(128) for name in ("exp_avg", "exp_avg_sq", "gradient")}
    halves = {name: torch.ones(128, dtype=torch.int16) for name in ("weight_hi", "weight_lo")}
    with pytest.raises(ValueError, match=message):
        PieceUpdater(hyperparameters()).update(**halves, **floats, segments=[], weights=weights)
    assert all(half.eq(1).all() for half in halves.values())


def test_same_bits_for_any_number_of_threads(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_num_threads(1))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        tensors = draw(((300_001,),), seed=0)
        stage = Stage(tensors)
        for step in (1, 2):
            stage.step(draw(((300_001,),), seed=step), lr=1e-2, weight_decay=0.1)
        results.append(stage.bits())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_gradient_of_none_is_not_a_gradient_of_zero() -> None:
    """torch skips a parameter without gradient altogether; it decays one whose gradient is zero, and counts that."""
    shapes = ((100,), (100,), (9000,), (100,))
    tensors = draw(shapes, seed=0)
    stage, fused = Stage(tensors), Reference(tensors, fused=True, weight_decay=0.5)
    for step in range(1, 5):
        gradients: list[Tensor | None] = [*draw(shapes, seed=step)]
        gradients[0] = torch.zeros(100)
        gradients[1] = None
        gradients[2] = None if step % 2 else gradients[2]
        stage.step(gradients, lr=0.1, weight_decay=0.5)
        fused.step(gradients, lr=0.1)
        assert_same_bits(stage, fused, touched=[True, False, step > 1, True])
    assert stage.steps == [4, 0, 2, 4]
    assert torch.equal(stage.tensor(1), tensors[1])
    assert not stage.moments(1)[0].any() and not stage.moments(1)[1].any()
    torch.testing.assert_close(stage.tensor(0), tensors[0] * 0.95**4)


def test_many_tiny_tensors_in_one_piece() -> None:
    shapes = tuple((1 + index % 70,) for index in range(300))
    tensors = draw(shapes, seed=0)
    stage = Stage(tensors, block_elements=4096)
    decays = [0.1 if index % 3 else 0.0 for index in range(300)]
    fused = Reference(tensors, fused=True, weight_decay=decays)
    before, padding = stage.bits(), stage.padding()
    for step in range(1, 4):
        drawn = draw(shapes, seed=step)
        gradients = [gradient if (index + step) % 5 else None for index, gradient in enumerate(drawn)]
        stage.step(gradients, lr=1e-2, weight_decay=decays)
        fused.step(gradients, lr=1e-2)
    assert_same_bits(stage, fused)
    assert torch.equal(stage.bits()[:, padding], before[:, padding])


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-39, 1e-30, 1e18, 3e38])
def test_extreme_gradients(scale: float) -> None:
    """Zero, subnormal and huge gradients, up to overflowing moments: the fused kernel's bits, whatever they are."""
    tensors = draw(((5000,), (77,)), seed=0)
    stage, fused = Stage(tensors), Reference(tensors, fused=True, weight_decay=0.1)
    for step in range(1, 4):
        gradients = [gradient.clamp(-1, 1) * scale for gradient in draw(((5000,), (77,)), seed=step)]
        stage.step(gradients, lr=0.1, weight_decay=0.1)
        fused.step(gradients, lr=0.1)
    assert_same_bits(stage, fused)


def test_tiny_weights_and_signed_zeros_keep_their_bits() -> None:
    weights = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, math.inf, -math.inf] * 9)
    stage = Stage([weights])
    stage.step([torch.zeros_like(weights)], lr=0.1, weight_decay=0.0)
    assert torch.equal(stage.tensor(0).view(torch.int32), weights.view(torch.int32))


def test_nan_stays_where_it_arises() -> None:
    """A NaN or inf in the gradient reaches that weight alone, and its hi is NaN too, whatever payload came along."""
    tensors = draw(((5000,), (77,)), seed=0)
    stage, fused = Stage(tensors), Reference(tensors, fused=True)
    gradients = draw(((5000,), (77,)), seed=1)
    gradients[0][3] = math.nan
    gradients[0][4096] = -math.inf
    gradients[0].view(torch.int32)[4500] = 0x7FFFFFFF  # rounded like a number, it would become a hi of -0.0
    gradients[1].view(torch.int32)[76] = -1  # and this one 0.0
    before, padding = stage.bits(), stage.padding()
    stage.step(gradients, lr=0.1, weight_decay=0.0)
    fused.step(gradients, lr=0.1)
    assert_same_bits(stage, fused)
    for index, (start, stop) in enumerate(stage.spans):
        assert torch.equal(stage.hi[start:stop].view(torch.bfloat16).isnan(), fused.tensor(index).isnan())
    assert stage.tensor(0).isnan().nonzero().flatten().tolist() == [3, 4096, 4500]
    assert torch.equal(stage.bits()[:, padding], before[:, padding])


def test_an_untouched_tensor_between_keeps_rubbish_and_nan() -> None:
    tensors = draw(((50,), (9000,), (50,)), seed=0)
    stage = Stage(tensors)
    start, stop = stage.spans[1]
    stage.hi[start:stop].view(torch.int16).fill_(0x7F80)  # halves that merge to a NaN which no split would write
    stage.lo[start:stop] = torch.arange(9000).to(torch.int16)
    before = stage.bits()
    stage.step([torch.full((50,), math.nan), None, torch.ones(50)], lr=0.1, weight_decay=0.1)
    assert torch.equal(stage.bits()[:, start:stop], before[:, start:stop])


def test_a_wide_gap_is_left_out_of_the_work() -> None:
    """Alignment gaps ride along in one run; blocks and untouched tensors in between begin another."""
    first, near, far = (
        SegmentUpdate(start=start, stop=stop, adam_step=1, lr=0.1, weight_decay=0.0)
        for start, stop in ((64, 100), (128, 300), (8192, 20000))
    )
    assert list(_runs([first, near, far], 16384)) == [
        [(64, 100, first), (128, 300, near)],
        [(8192, 16384, far)],
        [(16384, 20000, far)],
    ]


def test_the_rate_inside_the_update_is_the_schedules() -> None:
    tensors = draw(((5000,),), seed=0)
    schedule = Schedule(kind="cosine", lr=1e-2, warmup_steps=3, num_steps=10)
    stage, fused = Stage(tensors), Reference(tensors, fused=True, weight_decay=0.1)
    for step in range(1, 11):
        gradients = draw(((5000,),), seed=step)
        reports = stage.step(gradients, lr=schedule.at(step), weight_decay=0.1, piece_elements=4096)
        fused.step(gradients, lr=schedule.at(step))
        assert [report.learning_rates for report in reports] == [(schedule.at(step),)] * 2
        assert [report.num_elements for report in reports] == [4096, 904]
        assert_same_bits(stage, fused)


def test_segments_may_differ_in_rate_and_decay() -> None:
    tensors = draw(((100,), (100,), (100,)), seed=0)
    gradients = draw(((100,), (100,), (100,)), seed=1)
    stage = Stage(tensors)
    settings_of = ((0.1, 0.0), (0.01, 0.5), (0.1, 0.0))
    report = stage.updater.update(
        weight_hi=stage.hi,
        weight_lo=stage.lo,
        exp_avg=stage.exp_avg,
        exp_avg_sq=stage.exp_avg_sq,
        gradient=torch.cat([torch.cat([gradient, torch.full((28,), math.nan)]) for gradient in gradients]),
        segments=[
            SegmentUpdate(start=start, stop=stop, adam_step=1, lr=lr, weight_decay=weight_decay)
            for (start, stop), (lr, weight_decay) in zip(stage.spans, settings_of, strict=True)
        ],
    )
    assert report == PieceReport(num_elements=300, learning_rates=(0.01, 0.1))
    for index, (lr, weight_decay) in enumerate(settings_of):
        reference = Reference([tensors[index]], fused=True, weight_decay=weight_decay)
        reference.step([gradients[index]], lr=lr)
        assert torch.equal(stage.tensor(index), reference.tensor(0))


def test_the_gradient_is_only_read() -> None:
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    before = gradient.clone()
    arrays = {name: torch.zeros(8192) for name in ("exp_avg", "exp_avg_sq")}
    halves = {name: torch.zeros(8192, dtype=torch.int16) for name in ("weight_hi", "weight_lo")}
    segments = [SegmentUpdate(start=0, stop=5000, adam_step=1, lr=0.1, weight_decay=0.1)]
    PieceUpdater(hyperparameters()).update(**halves, **arrays, gradient=gradient, segments=segments)
    assert torch.equal(gradient, before)
    assert not arrays["exp_avg"][5000:].any()


def test_no_segments_is_no_work() -> None:
    stage = Stage(draw(((100,),), seed=0))
    before = stage.bits()
    assert stage.step([None], lr=0.1, weight_decay=0.1) == [PieceReport(num_elements=0, learning_rates=())]
    assert torch.equal(stage.bits(), before)


def test_late_steps_are_exact() -> None:
    """The kernel takes the step count as a float32: the last one that fits gives torch's bits; beyond is refused."""
    tensors = draw(((100,),), seed=0)
    stage, fused = Stage(tensors), Reference(tensors, fused=True)
    gradients = draw(((100,),), seed=1)
    stage.step(gradients, lr=0.1, weight_decay=0.0)
    fused.step(gradients, lr=0.1)
    stage.steps[0] = MAX_ADAM_STEP - 1
    fused.optimizer.state[fused.parameters[0]]["step"].fill_(MAX_ADAM_STEP - 1)
    stage.step(gradients, lr=0.1, weight_decay=0.0)
    fused.step(gradients, lr=0.1)
    assert_same_bits(stage, fused)
    with pytest.raises(ValueError, match=f"adam_step must be 1 to {MAX_ADAM_STEP}"):
        stage.step(gradients, lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize(
    ("start", "stop", "adam_step", "message"),
    [
        (32, 64, 1, "segment start must be a multiple of 64 elements, got 32"),
        (-64, 64, 1, "segment start must be a multiple of 64 elements, got -64"),
        (64, 64, 1, "segment stop must be more than its start 64, got 64"),
        (0, 64, 0, "adam_step must be 1 to 16777216, this update included, got 0"),
    ],
)
def test_illegal_segments_are_refused(start: int, stop: int, adam_step: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentUpdate(start=start, stop=stop, adam_step=adam_step, lr=0.1, weight_decay=0.0)


def test_wrong_pieces_are_refused_and_unchanged() -> None:
    stage = Stage(draw(((5000,),), seed=0))
    before = stage.bits()
    good: dict[str, Tensor] = {
        "weight_hi": stage.hi,
        "weight_lo": stage.lo,
        "exp_avg": stage.exp_avg,
        "exp_avg_sq": stage.exp_avg_sq,
        "gradient": torch.ones(5000),
    }

    def segment(start: int, stop: int) -> SegmentUpdate:
        return SegmentUpdate(start=start, stop=stop, adam_step=1, lr=0.1, weight_decay=0.1)

    fine = [segment(0, 5000)]
    cases: list[tuple[dict[str, Tensor], list[SegmentUpdate], str]] = [
        ({"weight_hi": stage.hi.view(torch.bfloat16)}, fine, "weight_hi must be torch.int16 or torch.uint16"),
        ({"exp_avg": stage.exp_avg.double()}, fine, "exp_avg must be torch.float32, got torch.float64"),
        ({"exp_avg_sq": stage.exp_avg_sq[:4096]}, fine, "exp_avg_sq must have weight_hi's 8192 elements, got 4096"),
        ({"gradient": torch.ones(50, 100)}, fine, "gradient must be flat, contiguous and on the CPU"),
        ({"gradient": torch.ones(10000)[::2]}, fine, "gradient must be flat, contiguous and on the CPU"),
        ({"gradient": torch.ones(4999)}, fine, "segment ends at 5000, past the 4999 elements of piece and gradient"),
        ({}, [segment(0, 128), segment(64, 256)], "segments must ascend without overlap: one starts at 64, before 128"),
        ({"gradient": torch.ones(9000)}, [segment(0, 8193)], "past the 8192 elements"),
    ]
    for changed, segments, message in cases:
        with pytest.raises(ValueError, match=message):
            stage.updater.update(**{**good, **changed}, segments=segments)
    assert torch.equal(stage.bits(), before)


@pytest.mark.parametrize(
    ("lr", "betas", "eps", "weight_decay", "message"),
    [
        (-0.1, BETAS, EPS, 0.0, "lr must be a finite number of at least 0, got -0.1"),
        (math.nan, BETAS, EPS, 0.0, "lr must be a finite number of at least 0, got nan"),
        (0.1, (1.0, 0.9), EPS, 0.0, r"betas\[0\] must be at least 0 and below 1, got 1.0"),
        (0.1, (0.9, math.nan), EPS, 0.0, r"betas\[1\] must be at least 0 and below 1, got nan"),
        (0.1, BETAS, -1.0, 0.0, "eps must be a finite number of at least 0, got -1.0"),
        (0.1, BETAS, EPS, math.inf, "weight_decay must be a finite number of at least 0, got inf"),
    ],
)
def test_senseless_hyperparameters_are_refused(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, message: str
) -> None:
    with pytest.raises(HyperparameterError, match=message):
        AdamWHyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class OnlyInPlace(TorchDispatchMode):
    """Refuses whatever makes memory or reads a number for the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self.num_kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, result = tree_leaves((args, kwargs)), func(*args, **(kwargs or {}))
        there = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            assert leaf is None or (isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in there), func
        self.num_kernels += not func.is_view
        return result


@pytest.mark.parametrize("piece_elements", [4096, None])
def test_with_scratch_on_a_device_nothing_is_allocated_or_waited_for(piece_elements: int | None) -> None:
    """And bits are the same: of tensors of different ages, some without a gradient, some that become NaN."""
    shapes = ((3000,), (5,), (70, 64), (4097,))
    stages = [Stage(draw(shapes, seed=0)) for _ in range(2)]
    length = piece_elements or stages[0].num_elements
    memory = UpdateScratch(
        weights=torch.full((length,), math.nan),
        patterns=torch.zeros(length, dtype=torch.int32),
        steps=torch.full((length // 64,), math.nan),
    )
    stages[1].updater = PieceUpdater(hyperparameters(), scratch=memory)
    for step in range(1, 5):
        gradients: list[Tensor | None] = list(draw(shapes, seed=step))
        gradients[step % 3] = None
        if step == 3:
            gradients[3] = torch.full(shapes[3], math.nan)
        stages[0].step(gradients, lr=0.1, weight_decay=0.1, piece_elements=piece_elements)
        updater, watch = stages[1].updater, OnlyInPlace()
        stages[1].updater = cast(PieceUpdater, Watched(updater, watch))
        stages[1].step(gradients, lr=0.1, weight_decay=0.1, piece_elements=piece_elements)
        stages[1].updater = updater
        assert watch.num_kernels
        assert torch.equal(stages[1].bits(), stages[0].bits())


class Watched:
    """A piece updater whose calls are watched."""

    def __init__(self, updater: PieceUpdater, watch: OnlyInPlace) -> None:
        self._updater, self._watch = updater, watch

    def update(self, **tensors: Any) -> PieceReport:
        with self._watch:
            return self._updater.update(**tensors)


def test_making_nans_canonical_leaves_every_other_number_as_it_is() -> None:
    """All signs, exponents and upper halves of mantissas, with a few lower ones: subnormals, zeros, infinities."""
    upper = torch.arange(2**16, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        patterns = ((upper << 16) + lower).to(torch.int32)
        floats = patterns.clone().view(torch.float32)
        expected = torch.where(floats.isnan(), 0x7FC00000, patterns)
        make_nans_canonical(floats)
        assert torch.equal(floats.view(torch.int32), expected)


def test_scratch_of_a_device_bounds_its_tensors() -> None:
    """Those must be there too, in blocks that keep the cuts legal."""
    memory = UpdateScratch(weights=torch.empty(100), patterns=torch.empty(100), steps=torch.empty(2))
    with pytest.raises(ValueError, match="block_elements must be a multiple of 64, got 100"):
        PieceUpdater(hyperparameters(), scratch=memory)
    there = torch.empty(128, device="meta")
    elsewhere = PieceUpdater(hyperparameters(), scratch=UpdateScratch(weights=there, patterns=there, steps=there))
    halves = {name: torch.zeros(64, dtype=torch.int16) for name in ("weight_hi", "weight_lo")}
    floats = {name: torch.zeros(64) for name in ("exp_avg", "exp_avg_sq", "gradient")}
    with pytest.raises(ValueError, match=r"weight_hi must be flat, contiguous and on meta, got .*device cpu"):
        elsewhere.update(**halves, **floats, segments=[])


def test_block_size_must_keep_the_cuts_legal() -> None:
    with pytest.raises(ValueError, match="block_elements must be a multiple of 64, got 100"):
        PieceUpdater(hyperparameters(), block_elements=100)


def test_scratch_is_two_blocks() -> None:
    assert PieceUpdater(hyperparameters()).scratch_bytes == 2 * 4 * SPLIT_BLOCK_ELEMENTS


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.norm.weight", (64,), False),
        ("scale", (), False),
        ("experts.bias", (8, 64), False),
        ("bias", (8, 64), False),
        ("unbias", (8, 64), True),
    ],
)
def test_decay_rule(name: str, shape: tuple[int, ...], decays: bool) -> None:
    assert decay_for(name, shape, 0.1, no_decay_norms=True) == (0.1 if decays else 0.0)
    assert decay_for(name, shape, 0.1, no_decay_norms=False) == 0.1
