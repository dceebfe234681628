"""LoRA: adapters trained as peft's are in plain PyTorch, kept in memory, exported in peft's format or merged.

Freezing itself, which the base is an instance of, is tested in `tests/scheduler/test_freezing.py`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import Dtype, Order, TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.scheduler.models import build_model
from hoist.scheduler.ops import Kind
from hoist.tiers.io.direct import DirectEngine
from hoist.tiers.store import Store
from hoist.tools.invoked import install_command
from hoist.tools.lora import add_adapters, is_adapter
from hoist.tools.lora_options import LoraOptions
from hoist.tools.opening import open_trainer
from tests.support.commands import Job, curve, hoist, make_job, save_model
from tests.support.models import FAMILIES, batch_of, tiny_config
from tests.support.sampling import thinned
from tests.support.training import (
    Engine,
    Outcome,
    Recipe,
    assert_identical,
    initial_weights,
    make_steps,
    read_states,
    torch_threads,
    train,
    train_reference,
    trained_part,
)
from tests.tools.test_import import load, tensors_in

PLANS: tuple[Order, ...] = ("vertical", "horizontal")
TARGETS = ("all-linear", "q_proj+v_proj", "down_proj+lm_head")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def lora_recipe(targets: str, family: str = "llama", dtype: Dtype = "float32") -> Recipe:
    """The base in bfloat16's numbers, with adapters: hoist's way on absent weights, peft's own in the plain loop."""
    options = LoraOptions.parse(f"r=4,alpha=12,targets={targets}")

    def alter(model: PreTrainedModel) -> None:
        if bool(torch.isnan(next(model.parameters()).sum())):
            add_adapters(model, options, base="base")
            return
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
        config = LoraConfig(
            r=4, lora_alpha=12, target_modules=targets if targets == "all-linear" else targets.split("+"),
            task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2",
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            inject_adapter_in_model(config, model)

    return Recipe(alter=alter, frozen_dtype="bfloat16", attention=attention_of(family), dtype=dtype)


def attention_of(family: str) -> Literal["sdpa", "eager"]:
    """Gemma-2 has eager attention only."""
    return "eager" if family == "gemma2" else "sdpa"


@cache
def reference(
    targets: str, num_micro_batches: int, family: str = "llama", dtype: Dtype = "float32"
) -> Outcome:
    expected = train_reference(
        tiny_config(family), make_steps(3, num_micro_batches), lora_recipe(targets, family, dtype)
    )
    return trained_part(expected, {name for name in expected.initial if is_adapter(name)})


@pytest.mark.parametrize(
    ("targets", "plan", "num_micro_batches", "budget_factor", "delay", "pin_trained"),
    thinned(5, TARGETS, PLANS, (1, 3), (1.0, 50.0), (0.0, 1.0), (True, False)),
)
def test_adapters_are_trained_as_in_plain_pytorch(
    targets: str,
    plan: Order,
    num_micro_batches: int,
    budget_factor: float,
    delay: float,
    pin_trained: bool,
    tmp_path: Path,
) -> None:
    """P118: recomputation layer by layer, on a base that is kept in bfloat16; the same bits."""
    engine = Engine(plan=plan, budget_factor=budget_factor, delay=delay, pin_trained=pin_trained)
    steps = make_steps(3, num_micro_batches)
    got = train(tmp_path / "store", tiny_config("llama"), steps, lora_recipe(targets), engine)
    assert_identical(got, reference(targets, num_micro_batches))
    if pin_trained:
        assert got.ops[Kind.READ_STATES] == got.ops[Kind.WRITE_STATES] == got.ops[Kind.READ_WEIGHTS] == 0


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", "all-linear"),
        ("mixtral", "q_proj+k_proj+v_proj+o_proj"),
        *(pytest.param(family, "all-linear", marks=pytest.mark.slow) for family in ("gemma2", "phi3", "opt")),
    ],
)
def test_other_families(family: str, targets: str, tmp_path: Path) -> None:
    """GPT-2's weights are [inputs, outputs]."""
    recipe = lora_recipe(targets, family)
    got = train(tmp_path / "store", tiny_config(family), make_steps(3, 2), recipe, Engine(pin_trained=True))
    assert_identical(got, reference(targets, 2, family))


@pytest.mark.parametrize("pin_trained", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_bfloat16(pin_trained: bool, tmp_path: Path) -> None:
    """The base is computed with as it is kept, and adapters with their float32 weights rounded."""
    recipe = lora_recipe("q_proj+v_proj", dtype="bfloat16")
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(3, 2), recipe, Engine(pin_trained=pin_trained))
    assert_identical(got, reference("q_proj+v_proj", 2, dtype="bfloat16"))
    assert got.ops[Kind.WIDEN] == 0


def test_all_linear_layers_are_those_of_peft() -> None:
    """But for routers of experts, which are no linear layers, and packed experts."""
    for family in FAMILIES:
        model, theirs = (build_model(tiny_config(family), attention=attention_of(family)) for _ in range(2))
        add_adapters(model, LoraOptions(r=2), base="base")
        found = {name for name, _ in model.named_parameters() if is_adapter(name)}
        if family == "mixtral":
            assert {name.split(".lora_")[0].rpartition(".")[2] for name in found} == {
                "q_proj", "k_proj", "v_proj", "o_proj",
            }  # fmt: skip
            continue
        config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2")
        inject_adapter_in_model(config, theirs, low_cpu_mem_usage=True)
        assert found == {name for name, _ in theirs.named_parameters() if is_adapter(name)}


def test_adapters_stay_in_memory_in_the_smallest_budget(tmp_path: Path) -> None:
    """P119: no states of the base on NVMe, 24 bytes an adapter's parameter; a step reads the base and writes none."""
    recipe = lora_recipe("all-linear")
    engine = Engine(pin_trained=True, commit_every=1000)
    got = train(tmp_path / "store", tiny_config("llama"), make_steps(4, 1), recipe, engine)
    assert got.memory is not None
    trained = sum(value.numel() for value in got.states.weights.values())
    weights = initial_weights(tiny_config("llama"), recipe)
    base = 2 * sum(value.numel() for name, value in weights.items() if not is_adapter(name))
    stages = tmp_path / "store" / "stages"
    states = sum(path.stat().st_size for path in stages.glob("*/*/c/*/*"))
    assert 24 * trained <= states <= 24 * (trained + 3 * 64 * 14 + 3 * 2 * 4096)
    assert base <= sum(path.stat().st_size for path in stages.glob("*/buffers/c/0")) <= base + 5 * 8192
    assert got.memory.kept_bytes >= 12 * trained
    assert all(step.nvme_written_bytes == 0 for step in got.metrics[1:])
    embedding = 2 * 503 * 64
    for step in got.metrics[1:]:
        # Layers twice; the embedding and the head, with the last norm, once; less what is still in a buffer.
        assert step.nvme_read_bytes <= 2 * base - 2 * embedding + 8 * 8192
        assert step.nvme_read_bytes >= base - 2 * embedding


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on a checkpoint in bfloat16."""
    made = make_job(tmp_path)
    save_model(made.model, "llama", dtype=torch.bfloat16)
    return made


def with_adapter(job: Job, adapter: Path) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what it has renamed
        model = PeftModel.from_pretrained(load(job.model).float(), adapter)
    assert isinstance(model, PeftModel)
    model.eval()
    return model


def test_train_resume_and_export(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """P086: the exported adapter has the store's values, and on the base it gives the loss that hoist's next step has;
    merged, it is what peft merges. Resuming needs no word of it.
    """
    lora = ("--lora", "r=4,alpha=12,targets=q_proj+v_proj+down_proj")
    whole, parts = job.folder / "whole.jsonl", job.folder / "parts.jsonl"
    options: dict[str, Any] = {"micro_batches": 1, "lr": 0.05}
    made = hoist(capfd, *job.arguments(*lora, "--metrics", whole, store=job.folder / "whole", steps=4, **options))
    assert made.code == 0, made.err
    assert hoist(capfd, *job.arguments(*lora, "--metrics", parts, steps=3, **options)).code == 0
    assert hoist(capfd, "verify", job.store).code == 0
    assert hoist(capfd, "snapshot", job.store, "third").code == 0

    adapter, merged = job.folder / "adapter", job.folder / "merged"
    exported = hoist(capfd, "export", job.store, adapter, "--verify")
    assert exported.code == 0, exported.err
    assert f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(job.model)!r})" in exported.out
    with DirectEngine() as engine, Store.open(job.store, engine=engine, writable=False) as store:
        live = read_states(store, engine).weights
    written = load_file(adapter / "adapter_model.safetensors")
    assert len(written) == len(live) == 2 * 3 * 3
    for name, value in live.items():
        assert torch.equal(written["base_model.model." + name.replace(".default", "")], value), name
    merging = hoist(capfd, "export", job.store, merged, "--merge", "--dtype", "float32", "--verify")
    assert merging.code == 0, merging.err

    assert hoist(capfd, "train", "--store", job.store, "--steps", 4, "--metrics", parts).code == 0
    assert curve(parts) == curve(whole)
    assert hoist(capfd, "restore", job.store, "third").code == 0

    ids = torch.from_numpy(np.load(job.data)[3 * 32 : 4 * 32].astype("int64")).view(2, 16)
    model = with_adapter(job, adapter)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
        assert loss == pytest.approx(curve(parts)[3][1], rel=1e-6)
        ours = load(merged)
        assert float(ours(input_ids=ids, labels=ids).loss) == pytest.approx(loss, rel=1e-5)
    theirs = model.merge_and_unload()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert tensors_in(merged).keys() == tensors_in(job.model).keys()


def test_adapters_begin_as_peft_begins_them(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """B is zero, A uniform within 1/sqrt(inputs), the same for the same seed alone; merged, that is still the base."""
    adapters = []
    for number, seed in enumerate((7, 7, 8)):
        store, target = job.folder / f"store{number}", job.folder / f"adapter{number}"
        made = hoist(capfd, *job.arguments("--lora", "r=8", "--seed", seed, store=store, steps=0))
        assert made.code == 0, made.err
        assert hoist(capfd, "export", store, target).code == 0
        adapters.append(load_file(target / "adapter_model.safetensors"))
    for name, value in adapters[0].items():
        assert torch.equal(value, adapters[1][name])
        if "lora_B" in name:
            assert not bool(value.any())
        else:
            assert not torch.equal(value, adapters[2][name])
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < float(value.abs().max()) <= bound
    merged = job.folder / "merged"
    assert hoist(capfd, "export", job.folder / "store0", merged, "--merge").code == 0
    base = tensors_in(job.model)
    assert all(torch.equal(value, base[name]) for name, value in tensors_in(merged).items())


def test_a_model_without_weights_is_initialised_as_ever(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    for store, told in (("plain", ()), ("adapted", ("--lora", "r=2", "--dropout", 0))):
        assert hoist(capfd, *job.arguments(*told, store=tmp_path / store, steps=0)).code == 0
    assert hoist(capfd, "export", tmp_path / "plain", tmp_path / "a").code == 0
    assert hoist(capfd, "export", tmp_path / "adapted", tmp_path / "b", "--merge").code == 0
    first, second = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_dropout_masks_do_not_depend_on_the_plan(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    curves = []
    for plan in PLANS:
        metrics = job.folder / f"{plan}.jsonl"
        told = ("--lora", "r=4,dropout=0.3", "--plan", plan, "--metrics", metrics)
        assert hoist(capfd, *job.arguments(*told, store=job.folder / plan)).code == 0
        curves.append(curve(metrics))
    assert curves[0] == curves[1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("r=0", r"^--lora: r=0 is not allowed"),
        ("r=4,r=5", r"'r=5' is not one of r=, alpha=, targets=, dropout=, each once"),
        ("rank=4", r"'rank=4' is not one of"),
        ("r=4.5", r"'r=4.5' is not a whole number"),
        ("alpha=inf", r"alpha=inf is not allowed"),
        ("dropout=1", r"dropout=1 is not allowed"),
        ("targets=", r"targets= names nothing"),
        ("targets=q_prj", r"targets=q_prj names no linear layer of the model; near it are q_proj"),
        ("targets=lm_head", r"targets=lm_head: the weight of lm_head is shared \(tied\)"),
        ("targets=all-linear+q_proj", r"all-linear stands alone"),
    ],
)
def test_what_lora_cannot_be(spec: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path, tie_word_embeddings=True)
    refused = hoist(capfd, *job.arguments("--lora", spec)).refusal()
    assert re.search(message, refused), refused
    assert not job.store.exists()


def test_what_goes_with_lora(job: Job, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    both = hoist(capfd, *job.arguments("--lora", "r=4", "--train", "*norm*")).refusal()
    assert both.startswith("--lora: is not allowed with --train or --freeze")
    assert hoist(capfd, *job.arguments(steps=1)).code == 0
    merged = hoist(capfd, "export", job.store, job.folder / "x", "--merge").refusal()
    assert "has no adapters to merge" in merged
    changed = hoist(capfd, "train", "--store", job.store, "--steps", 2, "--lora", "r=4").refusal()
    assert changed.startswith("--lora: r=4 is not what the store was made with (without it)")
    monkeypatch.setitem(sys.modules, "peft", None)
    missing = hoist(capfd, *job.arguments("--lora", "r=4", store=job.folder / "other")).refusal()
    assert missing.endswith(f"install it: {install_command('peft')}")


def test_from_python(job: Job) -> None:
    """A resume finds the adapters' settings in the store; others are refused."""
    config = TrainerConfig(
        host_memory_bytes=2**24, micro_batch_size=2, seq_len=12, num_micro_batches=1,
        optimizer=AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        schedule=Schedule(kind="constant", lr=1e-2, num_steps=4),
    )  # fmt: skip
    lora = LoraOptions(r=4)
    with open_trainer(job.store, model=job.model, config=config, lora=lora) as trainer:
        losses = [trainer.step([batch_of()]).loss]
        trainer.commit()
        losses.append(trainer.step([batch_of()]).loss)
    for again in (None, lora):
        with open_trainer(job.store, config=config, lora=again) as trainer:
            assert trainer.memory.kept_bytes >= 12 * trainer.memory.demand.num_pinned
            assert trainer.step([batch_of()]).loss == losses[1] < losses[0]
    with (
        pytest.raises(ConfigError, match=r"lora: .* was made with r=4,alpha=32,"),
        open_trainer(job.store, config=config, lora=LoraOptions(r=8)),
    ):
        pass
    with pytest.raises(ConfigError, match="lora: cannot go with train or freeze"), open_trainer(
        job.folder / "other", model=job.model, config=config, lora=lora, train=["*norm*"]
    ):
        pass
