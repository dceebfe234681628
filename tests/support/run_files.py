"""Stores with what runs leave in them: of a real short run, and of a long one over many stages, made up by rule.

What the files mean is said in `hoist.scheduler.status`, `.metrics` and `.timeline`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hoist.tools import cli
from tests.support.commands import Job


def written_run(job: Job) -> Job:
    """Four steps that keep nothing in memory, evaluations after 2 and 4, a snapshot called ``kept``."""
    arguments = job.arguments(
        steps=4, residency=0, host_memory="5MiB", validation_split=0.2, eval_every=2, commit_every=2
    )
    for words in (arguments, ["snapshot", job.store, "kept"]):
        code = cli.run([str(word) for word in words])
        assert code == 0, words
    return job


def write_long_run(store: Path, *, num_steps: int, num_stages: int, stage_prefix: str = "layer") -> None:
    """Replace what a run left in a store by metrics and a timeline of one that was longer and larger by far."""
    lines = []
    for step in range(1, num_steps + 1):
        wave = math.sin(step / 97)
        lines.append(
            {
                "step": step, "loss": 2 + 4 / math.sqrt(step) + 0.05 * wave, "grad_norm": 1 + 10 / step, "lr": 1e-3,
                "clip_scale": 1.0, "skipped_steps": 0, "tokens": 65536, "seconds": 20 + wave,
                "nvme_read_bytes": 10**9 + step, "nvme_written_bytes": 10**8 + step, "nvme_read_saved_bytes": step,
                "nvme_written_saved_bytes": step, "busy_seconds": {"io": 9.0, "compute": 18.0, "optim": 3.0},
                "stall_seconds": {"io": 1.0, "compute": 2.0, "optim": 15.0}, "host_peak_bytes": 3 * 10**9 + step,
                "device_peak_bytes": 0, "predicted_seconds": 19.0,
            }
        )  # fmt: skip
    # What must not be lost by thinning.
    lines[num_steps // 3]["loss"] = 77.0
    lines[num_steps // 2]["seconds"] = 333.0
    (store / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (store / "timeline.json").write_text(json.dumps(_timeline(num_steps, num_stages, stage_prefix)))


def _timeline(step: int, num_stages: int, prefix: str) -> dict[str, Any]:
    lanes, kinds = ["io", "copy", "compute", "optim", "commit"], ["read_weights", "forward", "backward", "update"]
    states = ["stored", "absent", "filling", "clean", "bound", "dirty", "writing"]
    seconds, ops, residency = 20.0, [], []
    each = seconds / (2 * num_stages)
    for visit in range(2 * num_stages):
        stage = visit if visit < num_stages else 2 * num_stages - 1 - visit
        start = visit * each
        for micro_batch in range(4):
            part = each / 4
            kind = 1 if visit < num_stages else 2
            ops.append([2, kind, stage, micro_batch, -1, start + micro_batch * part, start + (micro_batch + 1) * part])
        ops.append([0, 0, stage, -1, 0, start - each, start - each / 2])
        residency += [
            [start - each, 0, stage, 0, 2, 1, 10**6], [start - each / 2, 0, stage, 0, 3, 1, 10**6],
            [start, 0, stage, 0, 4, 1, 10**6], [start + each, 0, stage, 0, 0, 2, 10**6],
        ]  # fmt: skip
        if visit >= num_stages:
            ops.append([3, 3, stage, -1, 0, start + each, start + 1.5 * each])
            residency += [[start, 2, stage, 0, 5, 1, 10**6], [start + each, 2, stage, 0, 1, 2, 0]]
    return {
        "format_version": 1, "step": step, "start": 1.0e9, "seconds": seconds, "lanes": lanes, "kinds": kinds,
        "stage_names": [f"{prefix}.{number}" for number in range(num_stages)], "states": states,
        "tiers": ["device", "host", "nvme"], "truncated": False,
        "ops": sorted(ops, key=lambda op: op[5]), "residency": sorted(residency, key=lambda line: line[0]),
    }  # fmt: skip
