"""hoist's side of a comparison, in a process of its own: python -m hoist.tools.bench.sides.hoist_side JOB RESULT

Makes a store from the work's checkpoint and trains it; its options are those of `TrainerConfig`. Whether it did the
same as another side is `judging.py`'s business.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hoist._version import __version__
from hoist.optim import AdamWHyperparameters, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.creation import create_store
from hoist.scheduler.metrics import StepMetrics
from hoist.scheduler.models import build_model
from hoist.scheduler.setup import lay_out_stages, prepare
from hoist.scheduler.stages import StagedModel, split
from hoist.scheduler.trainer import Trainer
from hoist.tiers import footprint
from hoist.tiers.io.choose import choose_engine
from hoist.tiers.layout import StageLayout
from hoist.tools.bench.sides import counters
from hoist.tools.bench.sides.feeding import Windows, warm_up
from hoist.tools.bench.sides.job import Job, SideResult, Work, read_job, versions, write_result
from hoist.tools.bench.sides.sleeping import Watch, let_layers_sleep
from hoist.tools.import_weights import checkpoint_dtypes, checkpoint_weights
from hoist.tools.presets import ModelSource, load_model_source


def trainer_config(work: Work, options: dict[str, Any]) -> TrainerConfig:
    """A trainer of that work. ``options`` are further fields of :class:`TrainerConfig`, ``host_memory_bytes`` among
    them."""
    return TrainerConfig(
        micro_batch_size=work.micro_batch_size,
        seq_len=work.seq_len,
        num_micro_batches=work.num_micro_batches,
        optimizer=AdamWHyperparameters(
            lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay
        ),
        clip_norm=work.clip_norm,
        schedule=Schedule(kind="constant", lr=work.lr, num_steps=work.num_steps),
        **{name: value for name, value in options.items() if name != "io"},
    )


def staged_model(work: Work, source: ModelSource) -> tuple[StagedModel, Watch | None]:
    """The work's model in stages; its layers asleep where the work says so, and what then keeps their time."""
    model = build_model(source.config)
    watch = None if work.sleep is None else let_layers_sleep(model, work.sleep)
    staged = split(model)
    if source.checkpoint is not None:
        staged.keep_frozen_as(checkpoint_dtypes(source.checkpoint, staged))
    return staged, watch


def run(job: Job) -> SideResult:
    """Do the work. Raises what hoist raises, and ValueError for what hoist has not."""
    work, folder = job.work, Path(job.directory)
    if work.dtype != "float32" or not work.activation_checkpointing:
        raise ValueError("hoist's side computes in float32, and computes layers again in the backward")
    torch.set_num_threads(work.num_threads)
    windows = Windows(work)
    source = load_model_source(work.model)
    if source.checkpoint is None:
        raise ValueError(f"{work.model}: has no weights")
    footprint.warm_up()  # hoist's own, which a trainer would make; the baseline is what all sides have alike
    baseline_bytes = warm_up()
    config = trainer_config(work, job.options)
    steps, metrics = counters.Steps(), list[StepMetrics]()
    with counters.PeakMemory() as memory, choose_engine(job.options.get("io", "auto")) as engine:
        model, watch = staged_model(work, source)
        setup = prepare(model, lay_out_stages(model), config)
        store = create_store(
            folder / "store", model=model, setup=setup, engine=engine,
            source=checkpoint_weights(source.checkpoint, model, engine), attributes={},
        )  # fmt: skip
        with store, Trainer(model=model, store=store, engine=engine, config=config, setup=setup) as trainer:
            startup_seconds = counters.process_seconds()
            counters.drop_cache(counters.files_below(folder))
            if watch is not None:
                watch.forget()  # nothing from before the first step counts
            for number in range(work.num_steps):
                batches = [{"input_ids": ids, "labels": ids} for ids in windows.step(number)]
                with steps.measured():
                    metrics.append(trainer.step(batches))
            began = time.perf_counter()
            trainer.wait()
            waited = time.perf_counter()
            peak_bytes = memory.peak_bytes
            layer_calls = None if watch is None else watch.take().num_calls
            files = counters.files_below(folder)
            stored_bytes, cached_bytes = counters.stored_bytes(files), counters.cached_bytes(files)
            committing = time.perf_counter()
            trainer.commit()
            save_seconds = time.perf_counter() - committing + waited - began
            trained_loss = trainer.evaluate([{"input_ids": ids, "labels": ids} for ids in windows.step(0)]).loss
            applied = _applied(work, trainer, model)
            blank_bytes = sum(_blank_bytes(layout) for layout in store.layouts)
            kept_bytes = trainer.memory.kept_bytes
    return SideResult(
        name="hoist",
        work=applied,
        options=job.options,
        versions={"hoist": __version__, **versions("torch", "transformers", "numpy", "safetensors")},
        losses=[one.loss for one in metrics],
        step_seconds=steps.seconds,
        read_bytes=steps.read_bytes,
        written_bytes=steps.written_bytes,
        least_read_bytes=max(0, sum(one.nvme_read_bytes for one in metrics) - blank_bytes),
        cached_bytes=cached_bytes,
        stored_bytes=stored_bytes,
        startup_seconds=startup_seconds,
        save_seconds=save_seconds,
        baseline_bytes=baseline_bytes,
        peak_bytes=peak_bytes,
        trained_loss=trained_loss,
        layer_calls=layer_calls,
        details={
            "busy_seconds": [one.busy_seconds for one in metrics],
            "stall_seconds": [one.stall_seconds for one in metrics],
            "last_updates_seconds": waited - began,
            "kept_bytes": kept_bytes,
        },
    )


def _applied(work: Work, trainer: Trainer, model: StagedModel) -> Work:
    config = trainer.config
    return replace(
        work,
        seq_len=config.seq_len,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.num_micro_batches,
        num_steps=trainer.step_number,
        lr=config.schedule.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.clip_norm,
        num_threads=torch.get_num_threads(),
        attention=str(model.config._attn_implementation),
    )


def _blank_bytes(layout: StageLayout) -> int:
    """What is read of a stage before anything was written there, at most: the kernel gives zeros for space that is only
    reserved, without asking the drive. Moments, once; and what lies behind a stage's weights, forward and backward.
    """
    return 8 * layout.padded_elements + 8 * (layout.padded_elements - layout.num_elements)


if __name__ == "__main__":
    write_result(run(read_job(Path(sys.argv[1]))), Path(sys.argv[2]))
