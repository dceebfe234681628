"""What a stage is said to need beside the arena, against what torch's allocator really handed out for it.

The estimate comes from fake tensors; the truth from the profiler's record of every allocation and release of a real
forward and backward on random values, kernels' own scratch included.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma2Config, GPT2Config, LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

from hoist.scheduler import workspace
from hoist.scheduler.accumulate import DirectGradients, Target, block_elements
from hoist.scheduler.head_loss import HeadLoss
from hoist.scheduler.models import build_model
from hoist.scheduler.runtime import accumulate_into
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import HeadStage, LayerStage, Stage, StagedModel, split
from hoist.tiers.device import HereDevice
from hoist.tiers.errors import BudgetError
from hoist.tiers.footprint import PeakSampler, anonymous_bytes
from tests.support.models import tiny_config
from tests.support.training import (
    Engine,
    Recipe,
    layouts_of,
    make_steps,
    set_up,
    staged_model,
    trainer_config,
    trainer_on,
)

VOCAB = 3001
ROWS, TOKENS = 2, 96
_SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 192, "n_head": 6, "n_positions": 128}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, num_hidden_layers=1, num_key_value_heads=3),
    "gpt2": GPT2Config(**_GPT2, n_layer=1, bos_token_id=1, eos_token_id=2),
    "gemma2": Gemma2Config(**_SHAPE, num_hidden_layers=2, num_key_value_heads=3, head_dim=32, sliding_window=32),
}


def batch_of(seed: int, *, rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    input_ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "labels": input_ids}


def allocated_bytes(
    staged: StagedModel, stage: Stage, batch: Mapping[str, Tensor], *, loss_slice_tokens: int = 0
) -> int:
    """Peak of what the allocator gave out in one forward and backward of ``stage``, by its own record."""
    names = [*(spec.name for spec in stage.tensors), *stage.borrowed]
    dtype: torch.dtype = getattr(torch, staged.dtype)
    generator = torch.Generator().manual_seed(1)
    embed = staged.embed
    embed.bind({spec.name: torch.randn(spec.shape, generator=generator).to(dtype) for spec in embed.tensors})
    with torch.no_grad():
        hidden, context = embed.forward(batch)
    embed.unbind(forget=True)
    drawn = {name: torch.randn(staged.tensor(name)[1].shape, generator=generator) * 0.1 for name in names}
    values = {name: value.to(dtype) for name, value in drawn.items()}
    stage.bind(values)
    sums: dict[Tensor, Target] = {}
    for parameter in stage.parameters().values():
        sums[parameter] = Target(torch.zeros(parameter.shape), lambda: True)
        parameter.register_post_accumulate_grad_hook(accumulate_into(sums[parameter]))
    block = torch.empty(max(block_elements(value.shape) for value in values.values()), dtype=dtype)
    direct = DirectGradients(sums, block)
    source = hidden.clone().requires_grad_()
    gradient = torch.randn(hidden.shape, generator=generator).to(dtype)
    try:
        for recording in (False, True):  # the first run makes what is made once
            source.grad = None
            recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if recording else nullcontext()
            with recorder as profiler:
                if isinstance(stage, HeadStage):
                    HeadLoss(stage, slice_tokens=loss_slice_tokens).train(
                        [hidden], batch, context, 7, mode=direct, backward=torch.autograd.backward
                    )
                else:
                    assert isinstance(stage, LayerStage)
                    with direct:
                        output = stage.forward(source, context)
                    torch.autograd.backward(output, gradient)
                    del output
    finally:
        stage.unbind(forget=True)
    assert profiler is not None
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in CONFIGS),
        ("llama", torch.bfloat16),
        pytest.param("gpt2", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_what_a_real_run_allocates(family: str, dtype: torch.dtype) -> None:
    """Within 10%, and never far too small: kernels' scratch is all that may be missing."""
    staged = split(build_model(CONFIGS[family], dtype=dtype))
    found = workspace.measure(staged, batch_of(0))
    for stage, estimate in zip(staged.stages[1:], found.stages[1:], strict=True):
        real = allocated_bytes(staged, stage, batch_of(1))
        assert estimate == pytest.approx(real, rel=0.10), f"{stage.name}: {estimate} estimated, {real} allocated"


@pytest.mark.parametrize(("family", "name"), [("llama", "attention_mask"), ("gemma2", "position_ids")])
def test_masks_are_counted(family: str, name: str) -> None:
    """The largest batch makes every mask there can be; a run with other masks of its shape allocates as much."""
    attention: Literal["sdpa", "eager"] = "eager" if family == "gemma2" else "sdpa"
    staged = split(build_model(CONFIGS[family], attention=attention))
    config = trainer_config(Recipe(), Engine(), [[{**batch_of(0), name: torch.ones(ROWS, TOKENS)}]], 2**30)
    assert config.extra_inputs == (name,)
    largest = staged.batches.largest(config)
    assert largest.keys() == {"input_ids", "labels", name}
    found = workspace.measure(staged, largest)
    one_mask_bytes = ROWS * TOKENS * TOKENS * (1 if attention == "sdpa" else 4)
    assert found.context_bytes >= one_mask_bytes * (2 if family == "gemma2" else 1)
    given = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    given[0, 70:] = 0
    if name == "position_ids":
        given = torch.cat([torch.arange(60), torch.arange(36)]).expand(ROWS, TOKENS).contiguous()
    for stage, estimate in zip(staged.stages[1:], found.stages[1:], strict=True):
        real = allocated_bytes(staged, stage, {**batch_of(1), name: given})
        assert estimate == pytest.approx(real, rel=0.10), f"{stage.name}: {estimate} estimated, {real} allocated"
    demand = [
        prepare(staged, lay_out_stages(staged), replace(config, extra_inputs=extra, num_micro_batches=4)).memory.demand
        for extra in ((name,), ())
    ]
    assert demand[0].context_bytes - demand[1].context_bytes >= 3 * one_mask_bytes


@pytest.mark.parametrize("limit", [20, 96])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_estimate_of_a_sliced_loss_is_what_a_real_run_allocates(family: str, limit: int) -> None:
    """However many slices there are: what one leaves behind would show."""
    staged = split(build_model(CONFIGS[family]))
    estimate = workspace.measure(staged, batch_of(0), loss_slice_tokens=limit).stages[-1]
    real = allocated_bytes(staged, staged.head, batch_of(1), loss_slice_tokens=limit)
    assert estimate == pytest.approx(real, rel=0.10)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_estimate_does_not_depend_on_values(family: str) -> None:
    staged = split(build_model(CONFIGS[family]))
    assert workspace.measure(staged, batch_of(0)) == workspace.measure(staged, batch_of(5))


def test_equal_layers_need_the_same_and_larger_batches_more() -> None:
    staged = split(build_model(LlamaConfig(**{**CONFIGS["llama"].to_diff_dict(), "num_hidden_layers": 3})))
    small = workspace.measure(staged, batch_of(0, tokens=24))
    large = workspace.measure(staged, batch_of(0, tokens=48))
    assert len(set(small.stages[1:4])) == 1
    assert all(left < right for left, right in zip(small.stages, large.stages, strict=True))
    assert small.boundary_bytes == 4 * ROWS * 24 * 192


def test_measuring_takes_no_memory_for_weights() -> None:
    """A layer of 200M parameters is measured in less memory than one of its weights takes."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=4096, num_hidden_layers=1, num_attention_heads=32, intermediate_size=11008
    )
    staged = split(build_model(config))
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    workspace.measure(split(build_model(CONFIGS["llama"])), batch_of(0))  # what is made once
    sampler = PeakSampler(anonymous_bytes())
    try:
        workspace.measure(staged, {"input_ids": tokens, "labels": tokens})
        assert sampler.peak_bytes < 4 * 4096 * 11008 // 2
    finally:
        sampler.close()


def test_a_steps_inputs_are_let_go_with_it(tmp_path: Path) -> None:
    """Its state stays until its updates are done, a step or two later; the budget has no room for so many inputs."""
    steps = make_steps(3, 2)
    with trainer_on(tmp_path / "store", tiny_config("llama"), steps, Engine(delay=1.0)) as trainer:
        for step in steps:
            trainer.step(step)
        states = list(trainer._runtime._steps.values())
        assert len(states) > 1
        assert [(state.batches, state.inputs) for state in states] == [((), ())] * len(states)


class Counting(HereDevice):
    """A CPU that is a device of its own to whoever asks, and says that each stage took ``SCRATCH`` bytes."""

    SCRATCH, BEFORE, KEPT = 64 * 2**20, 3 * 2**20, 5 * 2**20
    is_separate = True
    counts_allocations = True

    def __init__(self) -> None:
        self.num_resets = self.num_given_back = 0
        self._reads = 0

    def reset_peak(self) -> None:
        self.num_resets += 1
        self._reads = 0

    def peak_bytes(self) -> int:
        """Right after a reset what is allocated, which libraries add to at their first use."""
        self._reads += 1
        now = self.BEFORE if self.num_resets == 1 else self.BEFORE + self.KEPT
        return now if self._reads == 1 else now + self.SCRATCH

    def give_back_free(self) -> None:
        self.num_given_back += 1


def test_on_an_accelerator_its_own_count_decides_and_everything_has_a_term() -> None:
    """Where kernels take more than the tensors that are seen; and what libraries keep is found once."""
    staged = split(build_model(LlamaConfig(**{**CONFIGS["llama"].to_diff_dict(), "num_hidden_layers": 3})))
    device = Counting()
    found = workspace.measure(staged, batch_of(0), device=device)
    for need in found.stages:
        assert (need - Counting.SCRATCH) % workspace.BLOCK_WASTE_BYTES == 0
        assert 0 <= need - Counting.SCRATCH < 40 * workspace.BLOCK_WASTE_BYTES
    assert found.kept_bytes == Counting.KEPT
    assert workspace.measure(staged, batch_of(0), device=device).kept_bytes == Counting.KEPT
    assert device.num_given_back == 2
    assert device.peak_bytes() == Counting.BEFORE + Counting.KEPT  # counted anew
    config = trainer_config(Recipe(), Engine(), [[batch_of(0)] * 4], 2**30)
    setup = prepare(
        staged, lay_out_stages(staged), replace(config, device_memory_bytes=2**30), device=device
    )
    demand = setup.memory.demand
    assert dict(setup.memory.device_parts())["workspaces of libraries"] == Counting.KEPT + workspace.BLOCK_WASTE_BYTES
    assert setup.memory.workspace_bytes == max(found.stages) + demand.context_bytes + demand.library_bytes
    # Each of the four micro-batches has masks, ids and labels, and a loss, in blocks of at least 512 bytes.
    assert demand.context_bytes == 4 * (found.context_bytes + 2 * ROWS * TOKENS * 8 + 512)
    assert setup.memory.device_need_bytes <= 2**30


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stage_that_does_not_fit_an_accelerator_is_refused_with_nothing_left(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = split(build_model(CONFIGS["llama"]))
    stage = staged.stages[number]
    made: list[weakref.ref[Tensor]] = []
    bind: Callable[[Mapping[str, Tensor]], None] = stage.bind
    calls = 0

    def bound(values: Mapping[str, Tensor]) -> None:
        nonlocal calls
        calls += 1
        bind(values)
        if number or calls == 2:  # the first stage is bound once for what it hands on
            made.extend(weakref.ref(value) for value in values.values())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    device = Counting()
    with monkeypatch.context() as patched:
        patched.setattr(stage, "bind", bound)
        with pytest.raises(BudgetError, match=r"^--device-memory: .* give a smaller --micro-batch-size or --seq-len"):
            workspace.measure(staged, batch_of(0), device=device)
        gc.collect()
        assert made
        assert [each() for each in made] == [None] * len(made)
        assert device.num_given_back == 1
    workspace.measure(staged, batch_of(0))


def test_what_tests_size_once_is_what_each_of_their_runs_would_find() -> None:
    """`training.py` divides what it has sized before, in place of sizing every run again."""
    recipe, steps = Recipe(), make_steps(1, 2)
    for engine in (
        Engine(budget_factor=1.2, delay=0.5),
        Engine(budget_factor=50.0, delay=0.5, residency=0.5),
        Engine(budget_factor=2.0, delay=0.5, clip_mode="speculative", commit_every=1),
    ):
        staged = staged_model(tiny_config("llama"), recipe)
        settings, setup = set_up(staged, layouts_of(staged, engine), recipe, engine, steps)
        assert setup == prepare(staged, layouts_of(staged, engine), settings)
