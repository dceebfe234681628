"""The shards of a checkpoint: a single file, or those that an index names, all present and each as the index says.

Both formats of Hugging Face models have the same index. What a shard holds, its format's reader says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hoist.tools.checkpoint import TensorEntry, some
from hoist.tools.errors import CheckpointError

#: How the files begin that stand for others in a checkout without Git LFS.
_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path, first: bytes) -> None:
    """Raise CheckpointError if a file that begins with ``first`` only stands for another in Git LFS."""
    if first.startswith(_POINTER[: len(first)]) and len(first) >= 8:
        raise CheckpointError(
            f"checkpoint {path}: is a Git LFS pointer, not the weights; get them with git lfs pull, or hf download"
        )


def find_shards(
    directory: Path, single_name: str, index_name: str, read_header: Callable[[Path], dict[str, TensorEntry]]
) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    """The files and tensors of a directory: of ``single_name`` if it is there, else of what ``index_name`` names.

    Raises CheckpointError where neither is, where the index does not fit, and as ``read_header`` does.
    """
    single, index = directory / single_name, directory / index_name
    if single.is_file():
        return (single,), read_header(single)
    if index.is_file():
        return _read_shards(index, read_header)
    raise CheckpointError(
        f"checkpoint {directory}: has neither {single_name} nor {index_name}; save the model with save_pretrained"
    )


def _read_shards(
    index: Path, read_header: Callable[[Path], dict[str, TensorEntry]]
) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    """The shards that an index names, all present, and their tensors, each in the shard that the index says."""
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
        weight_map = document["weight_map"]
        places = {name: file for name, file in weight_map.items() if isinstance(name, str) and isinstance(file, str)}
        if len(places) != len(weight_map) or not places:
            raise ValueError("weight_map must map tensor names to file names")
    except OSError as error:
        raise CheckpointError(f"checkpoint {index}: {error.strerror or error}; make the file readable") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {index}: not an index of shards ({error}); copy the file again") from error
    names = sorted(set(places.values()))
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise CheckpointError(
            f"checkpoint {index}: names shards outside its directory: {some(foreign)}; copy the file again"
        )
    shards = tuple(index.parent / name for name in names)
    absent = [path.name for path in shards if not path.is_file()]
    if absent:
        raise CheckpointError(
            f"checkpoint {index.parent}: {len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}; "
            "download them"
        )
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"checkpoint {index.parent}: tensor {name!r} is in two shards, {tensors[name].file.name} and "
                    f"{shard.name}; "
                    "keep the files of one checkpoint only"
                )
            tensors[name] = entry
    lost = [
        f"{name} ({file})" for name, file in places.items() if name not in tensors or tensors[name].file.name != file
    ]
    if lost:
        raise CheckpointError(
            f"checkpoint {index}: {len(lost)} tensors are not in the shard that the index names: {some(lost)}; copy "
            "the files again"
        )
    return shards, tensors
