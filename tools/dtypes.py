"""What layers compute with where nobody says: float32 on a CPU, bfloat16 on an accelerator that computes in it.

Many CPUs multiply bfloat16 far slower than float32. The option is in `options.py`, what it does `TrainerConfig.dtype`.
"""

from __future__ import annotations

from typing import get_args

import torch

from hoist.scheduler.config import Dtype

DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def resolve_dtype(option: str, device: torch.device) -> Dtype:
    """What ``--dtype`` means on ``device``. Raises ValueError on what is no value of the option.

    ``auto`` is bfloat16 only where a device has instructions for it: torch emulates it on older ones, slowly.
    """
    for dtype in DTYPES:
        if option == dtype:
            return dtype
    if option != "auto":
        raise ValueError(f"dtype: {option!r} is not one of auto, {', '.join(DTYPES)}")
    if device.type != "cuda":
        return "float32"
    with torch.cuda.device(device):  # torch tells of the current one
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
