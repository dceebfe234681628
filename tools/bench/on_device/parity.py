"""Whether training on a device gives what a plain loop on the same device gives: losses, weights, moments, bit by bit.

The plain loop has its model on the device and the masters, which AdamW changes, in host memory, as hoist's updates run
there. Both begin with the weights that the store was made with, and see the same micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hoist.optim.split import split as split_halves
from hoist.scheduler.config import Dtype
from hoist.tools.bench.on_device.request import ADAMW, MakeDevice, Request, Row, Shape, shown_share
from hoist.tools.opening import open_trainer
from hoist.tools.read_tensor import What, read_tensor

#: Losses that differ by more than this share of themselves are those of another computation.
LOSS_BOUNDS: Mapping[Dtype, float] = {"float32": 1e-5, "bfloat16": 1e-2}
#: Variables with which cuBLAS gives the same bits each time.
EXACT: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_STEPS = 3
_WHATS: tuple[What, ...] = ("weight", "exp_avg", "exp_avg_sq")
_HOST_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """What came out of some steps."""

    losses: list[float]
    states: Mapping[tuple[What, str], Tensor]
    """By array and name, float32."""


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Have kernels give the same bits each time, and float32 products be products of float32 (no TF32).

    FlashAttention's backward adds up in any order unless it is told; cuBLAS must have been told by the environment,
    see :data:`EXACT`. What has no other kernel than one that varies only warns.
    """
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    is_exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module that is made of properties
    fills = settings.fill_uninitialized_memory
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_exact, warn_only=warns)
        settings.fill_uninitialized_memory = fills
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_float32_matmul_precision(precision)


def parity(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    """Both dtypes, plans and delays as the scale says, against the plain loop of that dtype and against each other.

    A part (see `request.py`).
    """
    with exact_arithmetic():
        yield from _parity(request, make_device)


def _parity(request: Request, make_device: MakeDevice) -> Iterator[Row]:
    model = request.scale.tiny.save(request.directory / "parity-model")
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    initial: Mapping[str, Tensor] | None = None
    for dtype in dtypes:
        shape = replace(request.scale.tiny, dtype=dtype)
        first: _Trained | None = None
        plain: _Trained | None = None
        for plan, delay in request.scale.ways:
            store = request.directory / f"parity-{dtype}-{plan}-{delay}"
            with make_device() as device:
                config = shape.trainer_config(
                    host_memory_bytes=_HOST_BYTES, device_memory_bytes=request.device_budget(device), plan=plan,
                    delay=delay, residency=0.0, resident_weights=False,
                )  # fmt: skip
                with open_trainer(store, config=config, model=model, io=request.io, device=device) as trainer:
                    initial = _read(store, shape, ("weight",)) if initial is None else initial
                    losses = [trainer.step(shape.step(number)).loss for number in range(_STEPS)]
                    trainer.commit()
                ours = _Trained(losses=losses, states=_arrays(store, shape))
                if plain is None:
                    plain = _plain(shape, initial, device.torch_device)
            first = first or ours
            yield _compared(f"{dtype}, {plan}, delay {delay:g}", ours, plain, first, LOSS_BOUNDS[dtype])


def _compared(what: str, ours: _Trained, plain: _Trained, first: _Trained, bound: float) -> Row:
    """Losses may differ from the plain loop's by ``bound``, a share; from the first of hoist's runs in no bit."""
    losses = max(
        abs(mine - other) / max(abs(other), 1e-30) for mine, other in zip(ours.losses, plain.losses, strict=True)
    )
    differences = dict.fromkeys(_WHATS, 0.0)
    for (array, name), value in plain.states.items():
        gap = float((ours.states[array, name] - value).abs().max())
        differences[array] = max(differences[array], gap / (float(value.abs().max()) or 1.0))
    same, same_as_first = _same(ours, plain), _same(ours, first)
    numbers: dict[str, Any] = {"same_bits": same, "same_as_first": same_as_first, "loss_ratio": losses}
    numbers |= {f"{array}_ratio": value for array, value in differences.items()}
    found = "the bits of plain PyTorch" if same else f"beside plain PyTorch: loss {shown_share(losses)}, " + ", ".join(
        f"{array} {shown_share(value)}" for array, value in differences.items()
    )
    if not same_as_first:
        found += "; not the bits of the first of these"
    return Row(what=what, found=found, ok=(same or losses <= bound) and same_as_first, numbers=numbers)


def _same(left: _Trained, right: _Trained) -> bool:
    return left.losses == right.losses and all(
        torch.equal(left.states[key].view(torch.int32), value.view(torch.int32)) for key, value in right.states.items()
    )


def _names(shape: Shape) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in _model(shape).named_parameters()]


def _model(shape: Shape) -> nn.Module:
    auto: Any = AutoModelForCausalLM  # its methods have no types
    model: nn.Module = auto.from_config(
        shape.config, attn_implementation="sdpa", dtype=getattr(torch, shape.dtype)
    )
    return model.train()


def _read(store: Path, shape: Shape, whats: Sequence[What]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(read_tensor(store, name, what=what)) for name in _names(shape) for what in whats
    }


def _arrays(store: Path, shape: Shape) -> dict[tuple[What, str], Tensor]:
    return {(what, name): value for what in _WHATS for name, value in _read(store, shape, (what,)).items()}


def _rounded(master: Tensor, dtype: Dtype) -> Tensor:
    """The weight that is computed with: in bfloat16 what a store has in ``weight_hi``."""
    if dtype == "float32":
        return master
    hi = torch.empty(master.shape, dtype=torch.bfloat16)
    halves = hi.view(torch.int16).view(-1)
    split_halves(master.view(-1), halves, torch.empty_like(halves))
    return hi


def _plain(shape: Shape, initial: Mapping[str, Tensor], device: torch.device) -> _Trained:
    """The loop: micro-batches one after another, their gradients added up in float32."""
    masters = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
    model = _model(shape).to(device)
    weights = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        masters.values(), lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay, fused=True
    )
    losses = []
    for number in range(_STEPS):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(_rounded(masters[name].detach(), shape.dtype))
        step = shape.step(number)
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
        sums: dict[str, Tensor] = {}
        parts = []
        for batch in step:
            there = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**there, num_items_in_batch=num_items, use_cache=False).loss
            loss.backward()
            parts.append(loss.detach())
            for name, weight in weights.items():
                gradient, weight.grad = weight.grad, None
                if gradient is not None:
                    sums[name] = gradient.float() if name not in sums else sums[name].add_(gradient)
        losses.append(float(torch.stack(parts).sum()))
        for name, master in masters.items():
            master.grad = sums[name].to("cpu")
        optimizer.step()
    states: dict[tuple[What, str], Tensor] = {("weight", name): value.detach() for name, value in masters.items()}
    for name, master in masters.items():
        states |= {(array, name): optimizer.state[master][array] for array in _WHATS[1:]}
    return _Trained(losses=losses, states=states)
