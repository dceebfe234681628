"""Compiled layers: one graph for all that are equal, dropout that recomputation repeats, room for whole gradients.

Most tests compile with ``aot_eager``: the graphs are torch's, the kernels those of layers that are not compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hoist.scheduler import compiling, workspace
from hoist.scheduler.errors import CompileError, ConfigError
from hoist.scheduler.module_stages import stage_modules
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.tiers.device import HereDevice, Stream
from tests.scheduler.test_dropout import SeededStages
from tests.support.models import batch_of, tiny_config
from tests.support.training import (
    PLENTY_BYTES,
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    make_steps,
    staged_model,
    torch_threads,
    train,
    train_reference,
    trainer_config,
)

LLAMA = tiny_config("llama", dropout=0.3)
RECIPE = Recipe(attention="eager")  # whose dropout is an op of its own


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_layers(model: PreTrainedModel, step: int) -> None:
    """On the reference's side, as a user of plain PyTorch would."""
    if step == 1:
        for layer in model.get_submodule("model.layers").children():
            layer.forward = torch.compile(layer.forward)


def trained(directory: Path, backend: str, *, num_steps: int = 2) -> Outcome:
    return train(
        directory, LLAMA, make_steps(num_steps, 2), RECIPE, Engine(budget_factor=2.0), compile=True,
        compile_backend=backend,
    )  # fmt: skip


def test_one_graph_for_all_equal_layers_and_the_bits_of_layers_that_are_not_compiled(tmp_path: Path) -> None:
    """Of three layers: one for the forward, one for recomputation and backward, which draws the same masks."""
    got = trained(tmp_path / "store", "aot_eager")
    assert num_graphs() == 2
    expected = train_reference(LLAMA, make_steps(2, 2), RECIPE, before_micro_batch=SeededStages(0))
    assert_identical(got, expected)


def test_layers_have_their_own_forwards_again_afterwards() -> None:
    staged = staged_model(LLAMA, RECIPE)
    layers = [stage.module for stage in staged.layers]
    with compiling.compiled(staged, "eager"):
        assert all("forward" in vars(layer) for layer in layers)
    assert not any("forward" in vars(layer) for layer in layers)
    assert num_graphs() == 0


def test_modules_are_compiled_too_but_for_the_first_and_the_last() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    example = {"inputs": torch.zeros(1, 8), "targets": torch.zeros(1, 8)}
    staged = stage_modules(
        [nn.Linear(8, 8), *blocks, nn.Linear(8, 8)], loss=nn.MSELoss(reduction="sum"), example=example
    )
    hidden = torch.zeros(2, 8)
    with compiling.compiled(staged, "eager"), torch.no_grad():
        assert ["forward" in vars(module) for module in staged.model.children()] == [False, True, True, False]
        for layer, block in zip(staged.layers, blocks, strict=True):
            layer.bind({name: torch.ones(spec.shape) for name, spec in staged.used_by(layer)})
            assert torch.equal(block(hidden), torch.ones(2, 8).tanh())
            layer.unbind()
        assert num_graphs() == 1


def test_the_budget_has_room_for_all_gradients_of_a_layer_at_once() -> None:
    """Where they are not compiled one block of one weight's is enough; other stages need what they needed."""
    staged = staged_model(tiny_config("llama"), Recipe())
    batch = batch_of()
    plain = workspace.measure(staged, batch).stages
    whole = workspace.measure(staged, batch, layers_compiled=True).stages
    gradients = [sum(4 * spec.num_elements for spec in stage.tensors if spec.trainable) for stage in staged.stages]
    assert all(whole[stage] >= gradients[stage] for stage in (1, 2, 3))
    assert all(whole[stage] > plain[stage] for stage in (1, 2, 3))
    assert (whole[0], whole[-1]) == (plain[0], plain[-1])

    config = trainer_config(Recipe(), Engine(), make_steps(1, 1), PLENTY_BYTES)
    layouts = lay_out_stages(staged)
    before, after = (
        prepare(staged, layouts, replace(config, compile=compile)).memory.demand for compile in (False, True)
    )
    assert after.stages[1].workspace - before.stages[1].workspace >= whole[1] - plain[1]
    assert (before.compiler_bytes, after.compiler_bytes) == (0, compiling.KEPT_BYTES)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(CompileError, match=r"--compile-backend: 'nonsense' is none of torch's backends: .*aot_eager"):
        compiling.check("nonsense")
    with pytest.raises(ConfigError, match="compile_backend: '' is no backend's name"):
        replace(trainer_config(RECIPE, Engine(), make_steps(1, 1), PLENTY_BYTES), compile_backend="")


class Keeping(HereDevice):
    """Its libraries keep ``KEPT`` bytes from the first work in ``compute`` on, and nothing for other streams."""

    KEPT = 5 * 2**20
    is_separate = True
    counts_allocations = True
    was_used = False

    def stream(self, name: str) -> Stream:
        self.was_used = self.was_used or name == "compute"
        return super().stream(name)

    def peak_bytes(self) -> int:
        return self.KEPT * self.was_used


def test_what_libraries_keep_from_trying_the_compiler_on_has_a_term() -> None:
    device = Keeping()
    compiling.check("aot_eager", device)
    staged = staged_model(LLAMA, RECIPE)
    assert workspace.measure(staged, make_steps(1, 1)[0][0], device=device).kept_bytes == Keeping.KEPT


def test_what_cannot_be_compiled_is_one_line() -> None:
    def broken(module: torch.fx.GraphModule, inputs: object) -> object:
        raise ValueError("no such thing\nmore")

    text = r"^--compile: torch cannot compile .*no such thing.*; leave it out$"
    with pytest.raises(CompileError, match=text), compiling.explained("inductor"):
        torch.compile(lambda source: source + 1, backend=broken)(torch.ones(1))


@pytest.mark.slow
def test_inductor_without_a_compiler_is_one_line(tmp_path: Path) -> None:
    """In a process of its own: torch remembers the compiler that it found."""
    program = (
        "from hoist.scheduler.compiling import check\n"
        "from hoist.tiers.errors import RefusalError\n"
        "try: check('inductor')\n"
        "except RefusalError as error: print(error.exit_code, error)\n"
    )
    environment = {**os.environ, "CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.startswith("2 --compile: torch finds no C++ compiler (InvalidCxxCompiler")
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # in torch's inductor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the reference's
def test_inductor_gives_what_plain_pytorch_gives_with_the_same_compiled_layers(tmp_path: Path) -> None:
    """Masks too: the forward and the recomputation are two graphs, which draw the same numbers."""
    with torch._inductor.config.patch(compile_threads=1):
        got = trained(tmp_path / "store", "inductor", num_steps=3)
        assert num_graphs() == 2
        recipe = replace(RECIPE, before_step=compile_layers)
        expected = train_reference(LLAMA, make_steps(3, 2), recipe, before_micro_batch=SeededStages(0))
    assert_identical(got, expected)
