"""Finds tensors in the wrong memory on a fake device, where all are the CPU's: what a real device would refuse.

Within the device's work no op may mix device memory with host memory (`within_work`); outside none may touch device
memory at all (`on_host`). Orders and marks are `late_device.py`'s part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
#: They move between memories, or take host memory beside the device's.
_MIXING: frozenset[Any] = frozenset(
    {_aten.copy_, _aten._to_copy, _aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
)
#: Without a device they make host memory, wherever they are called. With one it is taken for the fake device's.
_FACTORIES: frozenset[Any] = frozenset(
    {
        torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.from_numpy, torch.full, torch.linspace, torch.ones,
        torch.rand, torch.randint, torch.randn, torch.randperm, torch.scalar_tensor, torch.tensor, torch.zeros,
    }
)  # fmt: skip


class MisplacedError(AssertionError):
    """An op was given memory that it could not use on a device of its own."""


class Placement:
    """Knows which memory is the device's: what it allocated, and what its work has made from that.

    To be used by one thread at a time, but for :meth:`is_device`.
    """

    def __init__(self, owns: Callable[[torch.Tensor], bool]) -> None:
        self._owns = owns
        #: What work has made on the device, by the storage's identity, which is not used again while a reference is.
        self._made: dict[int, StorageWeakRef] = {}

    def is_device(self, tensor: torch.Tensor) -> bool:
        """The tensor would lie in the memory of a real device."""
        return tensor.untyped_storage()._cdata in self._made or self._owns(tensor)

    @contextlib.contextmanager
    def within_work(self) -> Iterator[None]:
        """What runs within, on this thread, is the device's work. Raises MisplacedError where memories are mixed."""
        self._made = {key: reference for key, reference in self._made.items() if not reference.expired()}
        with _Transfers(self), _Work(self):
            yield

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What runs within, on this thread, is the host's. Raises MisplacedError where it touches device memory."""
        with _Host(self):
            yield

    def note(self, results: Any, *, on_device: bool) -> None:
        """Remember where the tensors of a result lie."""
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if on_device:
                    self._made[storage._cdata] = StorageWeakRef(storage)
                else:
                    self._made.pop(storage._cdata, None)


class _Work(TorchDispatchMode):
    """Watches the kernels of a work, those of a backward among them."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self._placement = placement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        placed = [self._placement.is_device(tensor) for tensor in given]
        if any(placed) and func.overloadpacket not in _MIXING:
            for tensor, on_device in zip(given, placed, strict=True):
                # A single number of the host may stand beside tensors of a device.
                if not on_device and tensor.dim() > 0:
                    places = ["device" if device else "HOST" for device in placed]
                    shapes = [f"{place} {list(it.shape)}" for place, it in zip(places, given, strict=True)]
                    raise MisplacedError(f"{func}: memories are mixed: {', '.join(shapes)}")
        results = func(*args, **kwargs)
        if func.overloadpacket is _aten.copy_:
            return results
        if func.overloadpacket is _aten._to_copy:
            moved = kwargs.get("device") is not None
            self._placement.note(results, on_device=moved or placed[0])
        else:
            # What a composite op makes of nothing, it makes where its inputs lie; see _Transfers for what people write.
            self._placement.note(results, on_device=any(placed) or not given)
        return results


class _Transfers(TorchFunctionMode):
    """Watches what is written in Python: the device is the CPU here, so that asking for it would do nothing."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func in _FACTORIES:
            self._placement.note(results, on_device=kwargs.get("device") is not None)
        elif func is torch.Tensor.cpu:
            results = results.clone() if results is args[0] else results
            self._placement.note(results, on_device=False)
        elif func is torch.Tensor.to and any(isinstance(it, torch.device) for it in (*args, *kwargs.values())):
            if results is args[0] and not self._placement.is_device(results):
                results = results.clone()
            self._placement.note(results, on_device=True)
        return results


class _Host(TorchDispatchMode):
    """Watches what the host does."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self._placement = placement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.numel() and self._placement.is_device(leaf):
                    raise MisplacedError(f"{func}: the host touches device memory, {list(leaf.shape)}")
        return func(*args, **kwargs)
