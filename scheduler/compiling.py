"""Decoder layers compiled by torch.compile: layers that are equal share one graph, whichever weights are bound.

Embeddings and head stay as they are. What a step then needs beside its buffers is `workspace.py`'s; when layers run is
the plan's. torch's compiler is imported only where this is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from hoist.scheduler.errors import CompileError
from hoist.scheduler.stages import StagedModel
from hoist.scheduler.workspace import first_use
from hoist.tiers.device import Device, HereDevice

#: What graphs, guards and code of a model's layers take in host memory (bytes), beyond what any compilation makes once,
#: which :func:`check` leaves in the baseline: up to 46 MiB were measured for one kind of layer with inductor.
KEPT_BYTES = 96 * 2**20
#: Most graphs of one layer class: layers of several kinds, shapes, with and without gradients. torch's 8 are few.
_MOST_GRAPHS = 64


class CompiledLayers:
    """The layers of a staged model with compiled forwards, from when this is made until :meth:`release`.

    A graph is made when a layer first runs, for each kind of layer, shape, and mode (without gradients in the forward,
    with them in the recomputation); parameters are its inputs, so that equal layers, and other buffers, share it.
    """

    def __init__(self, model: StagedModel, backend: str) -> None:
        """``backend``: one of ``torch._dynamo.list_backends()``. Nothing is compiled yet."""
        from torch._dynamo import config  # here: it costs a second, and most runs compile nothing

        self._modules: list[nn.Module] = []
        self._cleanup = ExitStack()
        self._cleanup.enter_context(config.patch(recompile_limit=max(config.recompile_limit, _MOST_GRAPHS)))
        for module in {id(stage.module): stage.module for stage in model.layers}.values():
            if "forward" in vars(module):
                continue  # somebody put a forward of their own there
            # Not module.compile(): hooks on the layer itself stay outside of the graph.
            module.forward = torch.compile(module.forward, backend=backend)
            self._modules.append(module)

    def release(self) -> None:
        """Give the layers their own forwards back. Idempotent."""
        while self._modules:
            del self._modules.pop().forward
        self._cleanup.close()


@contextmanager
def compiled(model: StagedModel, backend: str | None) -> Iterator[None]:
    """Layers compiled as long as the context lasts; as they are without a ``backend``."""
    layers = None if backend is None else CompiledLayers(model, backend)
    try:
        yield
    finally:
        if layers is not None:
            layers.release()


@contextmanager
def explained(backend: str | None) -> Iterator[None]:
    """Around what may compile: what torch's compiler cannot do is a :class:`CompileError` of one line."""
    if backend is None:
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise CompileError(_told(backend, error)) from error


def check(backend: str | None, device: Device | None = None) -> None:
    """Compile something small, forward and backward, and run it: what is missing shows before anything is created.

    ``device``: where layers will compute; None: the CPU. What a process makes once for its first compilation is then in
    the baseline of its memory. Torch's generators are left as they were. Does nothing without a ``backend``. Raises
    CompileError.
    """
    if backend is None:
        return
    device = HereDevice() if device is None else device
    with explained(backend), first_use(device):
        # As layers will: in another stream, libraries would keep a workspace that nobody uses again.
        device.stream("compute").put(partial(_try, backend, device.torch_device)).wait()


def _try(backend: str, device: torch.device) -> None:
    with torch.inference_mode(mode=False), torch.enable_grad():
        source = torch.ones(8, 8, device=device, requires_grad=True)
        torch.autograd.backward(torch.compile(_small, backend=backend)(source))


def _small(source: Tensor) -> Tensor:
    return nn.functional.gelu(source @ source).sum()


def _told(backend: str, error: Exception) -> str:
    from torch._dynamo.exc import InvalidBackend

    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = (f"{first} {more[0]}" if first.endswith(":") and more else first).rstrip(".;")
    if isinstance(error, InvalidBackend):
        names = ", ".join(torch._dynamo.list_backends())
        return f"--compile-backend: {backend!r} is none of torch's backends: {names}, eager, aot_eager"
    if "C++ compiler" in reason:
        return f"--compile: torch finds no C++ compiler ({reason}); install g++ (or name one in CXX), or leave it out"
    if "riton" in reason:
        return f"--compile: torch cannot compile for this device ({reason}); install triton, or leave it out"
    return f"--compile: torch cannot compile this model's layers here ({reason}); leave it out"
