"""Tries every causal LM of transformers, built tiny: python -m hoist.tools.sweep_models --write docs/models.md

Each trains three steps in hoist, in a store of its own, and beside it in plain PyTorch, in a process with a time limit.
How configs are made tiny is `tiny_models.py`; what is compared is written in the document.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.models import build_model, set_dropout
from hoist.scheduler.reading import TensorReader
from hoist.scheduler.runtime import mask_seed
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import Stage, StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers.io.base import IoEngine
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.store import Store
from hoist.tools.tiny_models import VOCAB_SIZE, causal_lm_types, tiny_config

#: Micro-batches by step.
Steps = Sequence[Sequence[Mapping[str, Tensor]]]

#: What a model's line may say. The first two are successes.
EXACT: Final = "the same bits"
ROUNDED: Final = "equal within rounding"
REFUSED: Final = "refused"
DIFFERENT: Final = "DIFFERENT"
UNTRAINED: Final = "not trained by PyTorch"

NUM_STEPS, NUM_MICRO_BATCHES, ROWS, TOKENS = 3, 2, 2, 12
DROPOUT = 0.1
BUDGET_BYTES = 2**30
#: Relative and absolute difference of losses and weights that sums in another order may make.
RELATIVE, ABSOLUTE = 1e-3, 2e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One model's line."""

    model_type: str
    outcome: str
    """One of the words above."""
    note: str = ""
    """Why not, or what to know."""

    def row(self) -> str:
        """As a row of the document's table."""
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]
        return f"| {self.model_type} | {name} | {self.outcome} | {self.note} |"


class Untrained(Exception):
    """Plain PyTorch does not train the model on tokens alone."""


def try_model(model_type: str) -> Result:
    """Train the tiny model of ``model_type`` both ways, with dropout, and compare."""
    torch.set_num_threads(1)
    try:
        config = tiny_config(model_type)
    except Exception as error:
        return Result(model_type=model_type, outcome=UNTRAINED, note=f"no tiny config: {_first_line(error)}")
    dropout: float | None = DROPOUT
    try:
        tried = copy.deepcopy(config)
        set_dropout(tried, DROPOUT)
        _reference(tried, "eager", dropout)
        config = tried
    except Exception:
        dropout = None  # a family that has none and says so
    try:
        _reference(config, "eager", dropout).forward(**_batches(1)[0][0], use_cache=False)
    except Exception as error:
        return Result(model_type=model_type, outcome=UNTRAINED, note=_first_line(error))
    try:
        staged, outcome, fault = _both_ways(config, dropout, NUM_MICRO_BATCHES)
        note = ""
        if outcome == DIFFERENT:
            # rounding that grows: with one micro-batch no sum has two orders
            staged, alone, _ = _both_ways(config, dropout, 1)
            if alone == EXACT:
                outcome = ROUNDED
                note = f"the same bits with one micro-batch; with {NUM_MICRO_BATCHES} rounding grows, {fault}"
    except Untrained as error:
        return Result(model_type=model_type, outcome=UNTRAINED, note=str(error))
    except Exception as error:
        return Result(model_type=model_type, outcome=REFUSED, note=_first_line(error))
    if outcome == DIFFERENT:
        return Result(model_type=model_type, outcome=outcome, note=fault)
    note = "; ".join(filter(None, (note, _about_loss(staged), _about_start(staged))))
    return Result(model_type=model_type, outcome=outcome, note=note)


def _both_ways(config: PreTrainedConfig, dropout: float | None, micro_batches: int) -> tuple[StagedModel, str, str]:
    """The staged model, the outcome, and the first difference."""
    built = build_model(config, dropout=dropout)
    attention = str(built.config._attn_implementation)
    staged = split(built)
    model = _reference(config, attention, dropout)
    expected = _train_reference(model, staged, _batches(micro_batches))
    losses, weights = _train(staged, _reference(config, attention, dropout).state_dict(), _batches(micro_batches))
    return staged, *_compare(staged, model, expected, losses, weights)


def _about_loss(staged: StagedModel) -> str:
    return "its own loss does not shift labels; trained is the shifted one" if staged.has_own_loss else ""


def _about_start(staged: StagedModel) -> str:
    """Whether a run can start from a config alone."""
    try:
        for stage in staged.stages:
            values = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in stage.tensors}
            stage.initialise(values, seed=0)
    except Exception:
        return "starts from a checkpoint only"
    return ""


# ------------------------------------------------------------------ the reference


def _batches(micro_batches: int) -> list[list[dict[str, Tensor]]]:
    """Steps of micro-batches that differ in how many labels count."""
    generator = torch.Generator().manual_seed(5)
    steps = []
    for _ in range(NUM_STEPS):
        step = []
        for micro_batch in range(micro_batches):
            ids = torch.randint(3, VOCAB_SIZE - 9, (ROWS, TOKENS), generator=generator)
            labels = ids.clone()
            labels[0, : 2 + 3 * micro_batch] = -100
            step.append({"input_ids": ids, "labels": labels})
        steps.append(step)
    return steps


def _reference(config: PreTrainedConfig, attention: str, dropout: float | None) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM  # its methods have no types
    torch.manual_seed(0)
    try:
        model: PreTrainedModel = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except ValueError:
        model = auto.from_config(config, dtype=torch.float32)
    model.train()
    for module in model.modules():
        if dropout is not None and isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = dropout
    return model


class _Masks:
    """Seeds torch where each stage begins, which is what makes plain PyTorch draw hoist's dropout masks."""

    def __init__(self, model: PreTrainedModel, staged: StagedModel) -> None:
        self.step, self.micro_batch = 0, 0
        self._calls = 0
        model.register_forward_pre_hook(self._begin)
        names = {id(module): name for name, module in staged.model.named_modules()}
        for name in {names[id(layer)] for layer in staged.layer_modules}:
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)

    def _seed(self, stage: int) -> None:
        torch.manual_seed(mask_seed(0, self.step, stage, self.micro_batch))

    def _begin(self, *_: Any) -> None:
        self._calls = 0
        self._seed(0)

    def _before_layer(self, *_: Any) -> None:
        if self._calls == 0:
            self._seed(1)

    def _after_layer(self, *_: Any) -> None:
        self._calls += 1
        self._seed(self._calls + 1)


def _hyperparameters() -> AdamWHyperparameters:
    # an eps that keeps updates smooth in the gradient, so that rounding stays rounding
    return AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def _train_reference(model: PreTrainedModel, staged: StagedModel, steps: Steps) -> list[float]:
    """Losses of the plain loop; the model holds the weights after it."""
    adam = _hyperparameters()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True
    )
    masks = _Masks(model, staged)
    before = {name: value.clone() for name, value in _persistent(model).items()}
    losses = []
    for step, micro_batches in enumerate(steps, start=1):
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        model.zero_grad(set_to_none=True)
        parts = []
        for micro_batch, batch in enumerate(micro_batches):
            masks.step, masks.micro_batch = step, micro_batch
            if staged.has_own_loss:
                logits = model(input_ids=batch["input_ids"], use_cache=False).logits.contiguous()
                loss = model.loss_function(
                    logits=logits, labels=batch["labels"], vocab_size=logits.shape[-1], num_items_in_batch=num_items
                )
            else:
                loss = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            torch.autograd.backward(loss)
            parts.append(loss.detach())
        losses.append(float(torch.stack(parts).sum()))
        optimizer.step()
    if not all(torch.isfinite(torch.tensor(losses))):
        raise Untrained(f"its losses are {losses}")
    changed = [name for name, value in _persistent(model).items() if not torch.equal(value, before[name])]
    if changed:
        raise ValueError(f"training changes the buffer {changed[0]}")
    return losses


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


# ------------------------------------------------------------------ hoist


def _train(
    staged: StagedModel, initial: Mapping[str, Tensor], steps: Steps
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights, persistent buffers too, of the same training in a store."""
    config = TrainerConfig(
        host_memory_bytes=BUDGET_BYTES,
        micro_batch_size=ROWS,
        seq_len=TOKENS,
        num_micro_batches=len(steps[0]),
        optimizer=_hyperparameters(),
        schedule=Schedule(kind="constant", lr=_hyperparameters().lr, num_steps=NUM_STEPS),
        residency=0.0,
        resident_weights=False,
        commit_every=NUM_STEPS,
        validate=True,
    )

    def fill(_stage: Stage, values: Mapping[str, Tensor], _staging: Tensor) -> None:
        for name, value in values.items():
            value.copy_(initial[name])

    with tempfile.TemporaryDirectory(prefix="hoist-sweep-") as folder, choose_engine("direct") as engine:
        setup = prepare(staged, lay_out_stages(staged), config)
        with (
            create_store(
                Path(folder) / "store", model=staged, setup=setup, engine=engine, source=fill, attributes={}
            ) as store,
            Trainer(model=staged, store=store, engine=engine, config=config, setup=setup, baseline_bytes=0) as trainer,
        ):
            losses = [trainer.step(micro_batches).loss for micro_batches in steps]
            trainer.commit()
            weights = _read(store, engine)
    return losses, weights


def _read(store: Store, engine: IoEngine) -> dict[str, Tensor]:
    """Every tensor of a store, with its shape."""
    values: dict[str, Tensor] = {}
    reader = TensorReader(store, engine, window_elements=2**18)
    try:
        for layout in store.layouts:
            for placed in (*layout.trainable, *layout.frozen):
                read = reader.weights if placed.spec.trainable else reader.frozen
                parts: list[Tensor] = []
                done = 0
                while done < placed.spec.num_elements:
                    parts.append(read(layout, placed, done).clone())
                    done += parts[-1].numel()
                empty = torch.empty(0, dtype=getattr(torch, placed.spec.dtype))
                values[placed.spec.name] = torch.cat(parts or [empty]).view(placed.spec.shape)
    finally:
        reader.close()
    return values


def _compare(
    staged: StagedModel,
    model: PreTrainedModel,
    expected: Sequence[float],
    losses: Sequence[float],
    weights: Mapping[str, Tensor],
) -> tuple[str, str]:
    """The outcome and, if it is no success, the first difference."""
    mine = dict(staged.model.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in model.state_dict() and not torch.equal(mine[name], buffer):
            return DIFFERENT, f"buffer {name} is not that of ordinary construction"
    reference = {name: value for name, value in model.state_dict().items() if name not in staged.aliases}
    if weights.keys() != reference.keys():
        return DIFFERENT, f"tensors {', '.join(sorted(weights.keys() ^ reference.keys())[:2])} are in one model only"
    if list(losses) == list(expected) and all(torch.equal(weights[name], reference[name]) for name in weights):
        return EXACT, ""
    pairs = [("losses", torch.tensor(losses), torch.tensor(expected))]
    pairs += [(name, weights[name], reference[name]) for name in weights]
    for name, got, wanted in pairs:
        if not torch.allclose(got.float(), wanted.float(), rtol=RELATIVE, atol=ABSOLUTE):
            return DIFFERENT, f"{name} differ by {float((got.float() - wanted.float()).abs().max()):.2g}"
    return ROUNDED, ""


# ------------------------------------------------------------------ all of them


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # what follows a class validation error's first line is the reason
    if not lines:
        return type(error).__name__
    text = lines[-1] if lines[0].startswith("Class validation error") else lines[0]
    text = re.sub(r"^\w*Error: ", "", text.replace("|", "/"))
    return text if len(text) <= 240 else text[:237] + "..."


def _child(model_type: str, answers: SimpleQueue[Result]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers.put(try_model(model_type))


def sweep(model_types: Sequence[str], *, limit_seconds: float = 120.0, jobs: int = 1) -> list[Result]:
    """Try each model in a process of its own; one that takes longer than the limit is ended and said to."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # before any fork: a pool of threads would not survive it
    context = multiprocessing.get_context("fork")
    waiting = list(model_types)
    running: list[tuple[str, Any, SimpleQueue[Result], float]] = []
    results: dict[str, Result] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            answers: SimpleQueue[Result] = context.SimpleQueue()
            process = context.Process(target=_child, args=(name, answers))
            process.start()
            running.append((name, process, answers, time.monotonic() + limit_seconds))
        name, process, answers, deadline = running.pop(0)
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            results[name] = Result(model_type=name, outcome=UNTRAINED, note=f"took over {limit_seconds:.0f} s")
        elif answers.empty():
            results[name] = Result(model_type=name, outcome=DIFFERENT, note=f"died with {process.exitcode}")
        else:
            results[name] = answers.get()
        print(results[name].row(), flush=True)
    return [results[name] for name in model_types]


def document(results: Sequence[Result]) -> str:
    """``docs/models.md``."""
    works = sum(result.outcome in (EXACT, ROUNDED) for result in results)
    trainable = sum(result.outcome != UNTRAINED for result in results)
    lines = [
        "# Models",
        "",
        f"Every causal LM of transformers {transformers.__version__}, built tiny and tried by "
        "`python -m hoist.tools.sweep_models`,",
        f"which wrote this page. Of {len(results)} model types {trainable} train in plain PyTorch on tokens alone; "
        f"{works} of those train in hoist.",
        "",
        "Each was trained for three steps of two micro-batches, with dropout 0.1 where its config has a dropout, in a",
        "store, and beside it by a plain loop with `torch.optim.AdamW(fused=True)`, torch being seeded in that where",
        "hoist's stages begin. *The same bits*: losses, weights and persistent buffers. *Equal within rounding*: to a",
        "relative 1e-3; weights that several stages use get their gradients in another order",
        "([architecture.md](architecture.md#exactness)). Buffers that are no weights equal those of ordinary",
        "construction in all of them. What is refused is refused with that line before anything is written.",
        "",
        "| model type | class | result | note |",
        "|---|---|---|---|",
        *(result.row() for result in results),
        "",
    ]
    return "\n".join(lines)


_ROW = re.compile(r"^\| (\S+) \| \S+ \| ([^|]+) \| ?([^|]*?) ?\|$", re.MULTILINE)


def read_document(text: str) -> list[Result]:
    """The results that a document lists."""
    rows = [Result(model_type=kind, outcome=outcome, note=note) for kind, outcome, note in _ROW.findall(text)]
    return [row for row in rows if row.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 1 if a model that hoist takes comes out different."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="*", help="model types, such as llama; all by default")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the document there; lines of models not named stay"
    )
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each model")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.models if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    if unknown:
        parser.error(f"unknown model type {unknown[0]}")
    results = sweep(options.models or causal_lm_types(), limit_seconds=options.limit, jobs=options.jobs)
    if options.write is not None:
        new = {result.model_type: result for result in results}
        old = read_document(options.write.read_text()) if options.write.exists() else []
        known = {result.model_type: result for result in old} | new
        options.write.write_text(document([known[name] for name in causal_lm_types() if name in known]))
    return int(any(result.outcome == DIFFERENT for result in results))


if __name__ == "__main__":
    sys.exit(main())
