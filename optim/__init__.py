"""How states change: AdamW on split weights, the gradient's norm, learning rates. Public names of the package.

Where states live is `hoist.tiers`; when they change is `hoist.scheduler`. optim knows nothing of either.
"""

from hoist.optim.adamw import (
    MAX_ADAM_STEP,
    SEGMENT_ALIGN_ELEMENTS,
    AdamWHyperparameters,
    PieceReport,
    PieceUpdater,
    SegmentUpdate,
    UpdateScratch,
    decay_for,
)
from hoist.optim.errors import HyperparameterError
from hoist.optim.norm import NORM_BLOCK_ELEMENTS, SquareSum, clip_scale
from hoist.optim.schedules import SCHEDULE_KINDS, Schedule, ScheduleKind
from hoist.optim.split import SPLIT_BLOCK_ELEMENTS, merge, split

__all__ = [
    "MAX_ADAM_STEP",
    "NORM_BLOCK_ELEMENTS",
    "SCHEDULE_KINDS",
    "SEGMENT_ALIGN_ELEMENTS",
    "SPLIT_BLOCK_ELEMENTS",
    "AdamWHyperparameters",
    "HyperparameterError",
    "PieceReport",
    "PieceUpdater",
    "Schedule",
    "ScheduleKind",
    "SegmentUpdate",
    "SquareSum",
    "UpdateScratch",
    "clip_scale",
    "decay_for",
    "merge",
    "split",
]
