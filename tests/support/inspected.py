"""Stores to inspect: of many stages, made without any durability; and documents as a run would write them.

Not a test itself; what must be seen in them is for the tests to say.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hoist.scheduler.status import (
    IoStatus,
    LaneStatus,
    Position,
    RunStatus,
    Speed,
    StateBytes,
    TierStatus,
)
from hoist.tiers import checksum, inventory, opening
from hoist.tiers import format as store_format
from hoist.tiers.format import CommitRecord, StageChecksums
from hoist.tiers.layout import StageLayout, TensorSpec, lay_out

STORE_ID = "0b8f8a52-1c7e-4a7f-9c55-1df0c8d1b6a1"


def many_layouts(num_layers: int) -> tuple[StageLayout, ...]:
    """``embed``, so many equal layers, ``head``: one chunk of 4096 elements each."""
    names = ["embed", *(f"layer.{number}" for number in range(num_layers)), "head"]
    return tuple(
        lay_out(
            index=index,
            name=name,
            tensors=[TensorSpec(name=f"model.{name}.weight", shape=(64, 64), trainable=True)],
        )
        for index, name in enumerate(names)
    )


def write_store(directory: Path, layouts: Sequence[StageLayout], *, step: int = 7, store_id: str = STORE_ID) -> None:
    """A store at a commit, its chunk files empty space; those of free slots are left out, which readers do not miss."""
    metadata = store_format.metadata_files(
        layouts, {"model": {"name": "tower", "type": "llama"}}, store_id=store_id
    )
    for name, data in metadata.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    checksums = [
        StageChecksums(chunks=np.zeros((layout.num_chunks, 4), np.uint32), frozen=0) for layout in layouts
    ]
    encoded = store_format.encode_checksums(layouts, checksums)
    record = CommitRecord(
        store_id=store_id,
        generation=2,
        step=step,
        slots=tuple("1" * layout.num_chunks for layout in layouts),
        checksum_file=store_format.checksum_path(2),
        checksum_file_crc32c=checksum.of_bytes(encoded),
        metadata_crc32c=opening.metadata_crc32c(metadata, layouts),
        adam_steps={placed.spec.name: step for layout in layouts for placed in layout.trainable},
        run={"options": {"steps": 100}},
        drives=({"id": store_id, "path": "."},),
    )
    (directory / store_format.CRC_DIRECTORY).mkdir()
    (directory / record.checksum_file).write_bytes(encoded)
    for chunk in inventory.record_chunks(directory, layouts, record, checksums):
        chunk.path.parent.mkdir(parents=True, exist_ok=True)
        with chunk.path.open("wb") as file:
            file.truncate(chunk.num_bytes)
    (directory / store_format.COMMIT_NAME).write_bytes(store_format.encode_commit(record))


def status_of(layouts: Sequence[StageLayout], *, store_id: str = STORE_ID, stage: int = 0) -> RunStatus:
    """What this process, training, might tell in the backward pass of a stage."""
    idle = (StateBytes(nvme=16384), StateBytes(nvme=32768), StateBytes(), StateBytes(host=2048))
    ahead = (StateBytes(nvme=16384, host=16384, filling=16384), *idle[1:])
    at_work = (
        StateBytes(nvme=16384, host=16384, bound=16384),
        StateBytes(nvme=16384, host=16384, dirty=16384, writing=8192),
        StateBytes(host=16384, dirty=16384),
        StateBytes(host=4096, nvme=4096),
    )
    stages = [idle] * len(layouts)
    stages[stage] = at_work
    if stage:
        stages[stage - 1] = ahead
    now = time.time()
    return RunStatus(
        store_id=store_id,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        started_at=now - 100,
        written_at=now,
        sequence=90,
        position=Position(
            step=41, num_steps=100, committed_step=7, current_step=42, phase="backward", stage=layouts[stage].name,
            micro_batch=2,
        ),
        speed=Speed(seconds_per_step=2.5, tokens_per_second=1234.5, eta_seconds=147.5),
        tiers={
            "device": TierStatus(),
            "host": TierStatus(budget_bytes=64 << 20, resident_bytes=20 << 20, peak_bytes=30 << 20),
            "nvme": TierStatus(budget_bytes=1 << 40, resident_bytes=100 << 20, peak_bytes=100 << 20),
        },
        lanes={
            "io": LaneStatus(
                current=f"read_states({layouts[stage].name})", in_flight=3, busy_share=0.61, stall_share=0.2
            ),
            "copy": LaneStatus(busy_share=0.0, stall_share=0.0),
            "compute": LaneStatus(
                current=f"backward({layouts[stage].name}, micro-batch 2)", in_flight=1, busy_share=0.9, stall_share=0.1
            ),
            "optim": LaneStatus(busy_share=0.3, stall_share=0.0),
            "commit": LaneStatus(),
        },
        io=IoStatus(
            engine="direct: O_DIRECT from 8 threads, parts of 4 MiB; chosen because there is no CUDA driver",
            read_bytes_per_second=1.25e9,
            write_bytes_per_second=8.5e7,
        ),
        host_bytes=40 << 20,
        host_peak_bytes=47 << 20,
        promised_bytes=67 << 20,
        stage_names=tuple(layout.name for layout in layouts),
        stages=tuple(stages),
        last_step={"step": 41, "loss": 5.4695, "grad_norm": 5.41, "lr": 3e-4},
        prediction={"seconds": 2.4, "bound_by": "compute"},
        wear={
            "written_bytes": 5 << 40, "written_bytes_per_step": 12 << 30, "tbw_bytes": 600e12, "used_share": 0.0092,
            "days_left": 812.3, "source": "--tbw",
        },
    )  # fmt: skip


def write_status(directory: Path, status: RunStatus, **changes: object) -> None:
    """Put a document into a store, with some fields changed."""
    changed = replace(status, **changes)  # type: ignore[arg-type]  # any of its fields
    (directory / store_format.STATUS_NAME).write_bytes(json.dumps(changed.to_json()).encode())
