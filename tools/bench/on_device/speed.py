"""How fast a model of a billion parameters is trained on a device: steps of hoist beside what limits them.

The limit of a step is the largest of three times, each measured in the same run: PyTorch alone computing the same
micro-batches with everything on the device, the step's bytes over the bus, the step's bytes on the drive. What
ZeRO-Infinity took for the same shape, on one machine, is here too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hoist.scheduler.config import TrainerConfig
from hoist.tiers.device import Device
from hoist.tiers.io.choose import choose_engine, why_no_kvikio
from hoist.tiers.io.mixed import measure_mixed
from hoist.tools.bench.on_device.parity import LOSS_BOUNDS
from hoist.tools.bench.on_device.request import WHOLE, MakeDevice, Request, Row, Shape, shown_share
from hoist.tools.bench.sides.in_memory import checkpoint_activations
from hoist.tools.bench.turns import moved_bytes
from hoist.tools.opening import open_trainer
from hoist.tools.sizes import show_bytes, show_decimal
from hoist.tools.transfers import measure_transfers

#: Dense products of bfloat16 with sums in float32, operations a second, as makers say (NVIDIA's data sheets of H200,
#: H100 and A100, where the figures of the first two are with sparsity, twice as high; and the Ada white paper's table
#: for the 4090), by what a device's name has in it; the first that fits.
PEAKS = (
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("RTX 4090", 165.2e12),
)
#: A step of DeepSpeed 0.19.8's ZeRO-3 with parameters and optimizer on NVMe, bf16, of the shape `WHOLE`: one H200, 16
#: cores, 128 GiB, ext4, direct I/O at 1.6 GB/s read and 2.3 to 2.6 written; it took 28.7 GB of host memory.
ZERO_INFINITY_SECONDS = 28.1
#: Counted steps of a run, after one that is not.
_STEPS = 2
#: The drive alone is measured with so many of a step's bytes at most.
_MOST_BYTES = 3 * 2**30
_STORE = "timed-store"


def making(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Make the store that the steps are timed on, with initialised weights. A part (see `request.py`)."""
    shape = request.scale.whole
    model = shape.save(request.directory / "timed-model")
    with make_device() as device:
        config = _config(request, device, request.scale.host_memory_bytes[0])
        began = time.perf_counter()
        with open_trainer(
            request.directory / _STORE, config=config, model=model, io=request.io, device=device, fresh=True
        ):
            seconds = time.perf_counter() - began
    yield Row(
        what=f"making a store of {shape.num_parameters / 1e9:.3f}B parameters",
        found=f"{seconds:.1f} s",
        numbers={"making_seconds": seconds, "num_parameters": shape.num_parameters},
    )


def limits(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """What the device computes, and what the bus carries, with nothing of hoist beside. A part (see `request.py`)."""
    shape = request.scale.whole
    with make_device() as device:
        peak, source = _peak(request, device)
        yield Row(
            what=f"peak of the device in {shape.dtype}", found=f"{peak / 1e12:.1f} TFLOP/s, {source}",
            numbers={"peak_flops": peak, "peak_source": source},
        )  # fmt: skip
        if device.is_separate:
            with choose_engine(request.io) as engine:
                seen = measure_transfers(request.directory, engine, device, num_bytes=request.scale.copied_bytes)
            for one in seen.transfers:
                rate = one.bytes_per_second
                yield Row(
                    what=one.name,
                    found=one.error if rate is None else f"{rate / 1e9:.2f} GB/s, {one.path}",
                    ok=None if rate is None else one.verified,
                    numbers={f"{one.name.replace(' ', '_')}_bytes_per_second": rate},
                )
        else:
            yield Row(what="bus", found="not looked at: the device computes in host memory")
        seconds = _computing(shape, device)
        flops = 6 * shape.num_parameters * shape.tokens
        yield Row(
            what="PyTorch alone, all on the device, layers computed again, no update",
            found=f"{seconds:.2f} s for a step's {shape.tokens:,} tokens, MFU {flops / seconds / peak:.1%} by 6N",
            numbers={"compute_seconds": seconds},
        )


def _peak(request: Request, device: Device) -> tuple[float, str]:
    if request.peak_flops is not None:
        return request.peak_flops, "as told"
    described = device.describe()
    if request.scale.whole.dtype == "bfloat16":
        for name, flops in PEAKS:
            if name in described:
                return flops, f"as its maker says of {name}"
    size = request.scale.matrix
    matrix = torch.ones(size, size, dtype=getattr(torch, request.scale.whole.dtype), device=device.torch_device)
    out = torch.empty_like(matrix)
    found = []
    for _ in range(4):
        _finish(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix, out=out)
        _finish(device)
        found.append(2 * size**3 / (time.perf_counter() - began))
    return max(found), f"measured, a product of {size} x {size}"


def _finish(device: Device) -> None:
    """Wait for torch's own stream."""
    if device.torch_device.type != "cpu":
        torch.get_device_module(device.torch_device).synchronize(device.torch_device)


def _computing(shape: Shape, device: Device) -> float:
    """Seconds of the forwards, recomputations and backwards of a step, weights and gradients staying on the device."""
    auto: Any = AutoModelForCausalLM  # its methods have no types
    with torch.device(device.torch_device):
        model: PreTrainedModel = auto.from_config(
            shape.config, attn_implementation="sdpa", dtype=getattr(torch, shape.dtype)
        )
    model.train()
    checkpoint_activations(model)
    step = [{name: tensor.to(device.torch_device) for name, tensor in batch.items()} for batch in shape.step(0)]
    seconds = 0.0
    for counted in (step[:1], step):  # the first one makes what is made once
        _finish(device)
        began = time.perf_counter()
        for batch in counted:
            model(**batch, num_items_in_batch=shape.tokens, use_cache=False).loss.backward()
        _finish(device)
        seconds = time.perf_counter() - began
    return seconds


def on_drive(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Steps with everything on the drive. A part (see `request.py`)."""
    return _steps(request, make_device, "everything on the drive", 0, io="direct")


def on_drive_delayed(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """The same with half of the updates in the next forward. A part (see `request.py`)."""
    return _steps(request, make_device, "everything on the drive, delay 0.5", 0, io="direct", delay=0.5)


def in_memory(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Steps with room for all states in host memory. A part (see `request.py`)."""
    return _steps(request, make_device, "states in host memory", 1, io="direct")


def through_kvikio(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Steps with everything on the drive, through kvikio, with GPUDirect Storage where that works."""
    if why_no_kvikio() is not None:
        yield Row(what="kvikio", found=f"not looked at: {why_no_kvikio()}")
        return
    yield from _steps(request, make_device, "everything on the drive", 0, io="kvikio")


def through_copies(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """The same without GPUDirect Storage, where there is any; the process has KVIKIO_COMPAT_MODE=ON."""
    if why_no_kvikio() is not None or not any(Path("/proc/driver").glob("nvidia-fs")):
        yield Row(what="kvikio without GDS", found="not looked at: there is no GDS (nvidia-fs) to be left out")
        return
    yield from _steps(request, make_device, "everything on the drive, without GDS", 0, io="kvikio")


def updated_there(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Steps whose updates run on the device. A part (see `request.py`)."""
    yield from _steps(
        request, make_device, "on the drive, updates on the device", 0, io="direct", optim_device="device"
    )


def _config(request: Request, device: Device, host_memory_bytes: int, **settings: Any) -> TrainerConfig:
    return request.scale.whole.trainer_config(
        host_memory_bytes=host_memory_bytes, device_memory_bytes=request.device_budget(device), **settings
    )


def _steps(
    request: Request, make_device: MakeDevice, name: str, budget: int, *, io: str, **settings: Any
) -> Iterator[Row]:
    """Time steps on the store that :func:`making` made, which stays as it is: nothing is committed."""
    shape = request.scale.whole
    host_memory_bytes = request.scale.host_memory_bytes[budget]
    with make_device() as device:
        config = _config(request, device, host_memory_bytes, **settings)
        device.reset_peak()
        with open_trainer(
            request.directory / _STORE, config=config, io=io, device=device, verify="never"
        ) as trainer:
            trainer.step(shape.step(0))
            metrics, crossed = [], []
            for number in range(1, 1 + _STEPS):
                metrics.append(trainer.step(shape.step(number)))
                crossed.append(trainer.bus_bytes())
        read, written = moved_bytes(metrics)
        with choose_engine(io) as engine:
            path = f"{engine.describe()}; device memory: {engine.describe_device_path()}"
            drive = measure_mixed(
                request.directory, engine, read_bytes=read, written_bytes=written, most_bytes=_MOST_BYTES
            )
    seconds = statistics.median(one.seconds for one in metrics)
    up, down = (int(statistics.median(way)) for way in zip(*crossed, strict=True))
    bus = _bus_seconds(request, up, down)
    times = {
        "computing": request.found.get("compute_seconds"), "the bus": bus, "the drive": drive.seconds,
    }  # fmt: skip
    known = {what: value for what, value in times.items() if value is not None}
    bound = max(known, key=lambda what: known[what])
    peak = request.found.get("peak_flops")
    rate = shape.num_parameters * shape.tokens / seconds
    stalls = {
        lane: statistics.median(one.stall_seconds[lane] for one in metrics) for lane in metrics[0].stall_seconds
    }
    busy = {lane: statistics.median(one.busy_seconds[lane] for one in metrics) for lane in metrics[0].busy_seconds}
    what = f"{name}, host {show_bytes(host_memory_bytes)}, {io}"
    numbers = {
        "step_seconds": seconds, "tokens_per_second": shape.tokens / seconds, "read_bytes": read,
        "written_bytes": written, "up_bytes": up, "down_bytes": down, "stall_seconds": stalls, "busy_seconds": busy,
        "limit_seconds": known, "roofline_ratio": seconds / known[bound], "io_path": path,
        "host_peak_bytes": metrics[-1].host_peak_bytes, "device_peak_bytes": metrics[-1].device_peak_bytes,
        "losses": [one.loss for one in metrics],
        "mfu_6n_share": None if peak is None else 6 * rate / peak,
        "mfu_8n_share": None if peak is None else 8 * rate / peak,
    }  # fmt: skip
    yield Row(
        what=what,
        found=f"{seconds:.2f} s a step, {shape.tokens / seconds:,.0f} tokens/s"
        + ("" if peak is None else f", MFU {6 * rate / peak:.1%} by 6N, {8 * rate / peak:.1%} by 8N"),
        numbers=numbers,
    )
    before = request.found.get("losses")
    if before is not None:  # of the same steps of the same store, with other budgets or ways
        pairs = zip([one.loss for one in metrics], before, strict=True)
        apart = max(abs(mine - other) / max(abs(other), 1e-30) for mine, other in pairs)
        yield Row(
            what="  losses beside those before",
            found="the same bits" if apart == 0.0 else f"differ by {shown_share(apart)}",
            ok=apart <= LOSS_BOUNDS[shape.dtype],
        )
    yield Row(
        what="  bytes of a step",
        found=f"drive: {show_decimal(read)} read, {show_decimal(written)} written; "
        f"bus: {show_decimal(up)} up, {show_decimal(down)} down",
    )
    yield Row(
        what="  limits",
        found=f"{numbers['roofline_ratio']:.2f} times {bound}; "
        + ", ".join(f"{limit} {value:.2f} s" for limit, value in known.items()),
        ok=None,
    )
    yield Row(
        what="  stalled",
        found=", ".join(f"{lane} {value:.2f} s" for lane, value in stalls.items() if busy[lane] or value),
    )
    if shape == WHOLE:
        times_as_fast = ZERO_INFINITY_SECONDS / seconds
        least = 8.0 if budget else 1.7
        yield Row(
            what="  beside ZeRO-Infinity's 28.1 s (H200, see docs/benchmarks.md)",
            found=f"{times_as_fast:.2f} times as fast; at least {least:g} is wanted",
            ok=times_as_fast >= least,
            numbers={"zero_infinity_ratio": times_as_fast},
        )


def _bus_seconds(request: Request, up: int, down: int) -> float | None:
    """Both directions at once, each at the speed that it has alone; None where that was not measured."""
    rates = [request.found.get(f"{way}_bytes_per_second") for way in ("host_to_device", "device_to_host")]
    if None in rates:
        return None
    return max(num_bytes / float(rate) for num_bytes, rate in zip((up, down), rates, strict=True) if rate)

