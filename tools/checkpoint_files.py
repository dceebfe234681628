"""Which weights a Hugging Face directory has: the reader of its format, safetensors before `pytorch_model.bin`.

The formats are read by `safetensors_reader.py` and `torch_reader.py`, under the contract of `checkpoint.py`.
"""

from __future__ import annotations

from pathlib import Path

from hoist.tools import safetensors_reader, torch_reader
from hoist.tools.checkpoint import CheckpointReader
from hoist.tools.safetensors_reader import SafetensorsReader
from hoist.tools.torch_reader import TorchReader

#: Files that make a directory one with weights, in the order in which they are looked for.
WEIGHT_FILES = (
    safetensors_reader.SINGLE_FILE,
    safetensors_reader.INDEX_FILE,
    torch_reader.SINGLE_FILE,
    torch_reader.INDEX_FILE,
)


def find_checkpoint(directory: Path) -> CheckpointReader | None:
    """The weights in a directory, headers checked, or None where there are none. Raises CheckpointError."""
    present = [name for name in WEIGHT_FILES if (directory / name).is_file()]
    if not present:
        return None
    if present[0] in (safetensors_reader.SINGLE_FILE, safetensors_reader.INDEX_FILE):
        return SafetensorsReader(directory)
    return TorchReader(directory)
