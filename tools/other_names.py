"""Names that options of `hoist train` have in other trainers, so that a refusal can say what they are called here.

Nothing is accepted under them: what they mean differs in detail. `exits.py` tells a refusal.
"""

from __future__ import annotations

_BATCH = "--micro-batch-size, rows in memory at a time, and --micro-batches, how many of those make a step"
_EPOCHS = "--steps; a run shows how many of them are one epoch"
#: What to give instead, by the name without dashes in front, in the spelling with dashes.
_HERE = {
    "batch-size": _BATCH,
    "per-device-train-batch-size": _BATCH,
    "gradient-accumulation-steps": "--micro-batches",
    "accumulation-steps": "--micro-batches",
    "epochs": _EPOCHS,
    "num-epochs": _EPOCHS,
    "num-train-epochs": _EPOCHS,
    "max-steps": "--steps",
    "learning-rate": "--lr",
    "lr-scheduler-type": "--lr-schedule",
    "max-grad-norm": "--clip-norm",
    "block-size": "--seq-len",
    "max-length": "--seq-len",
    "max-seq-length": "--seq-len",
    "max-seq-len": "--seq-len",
    "model-name-or-path": "--model",
    "dataset": "--data",
    "dataset-name": "--data",
    "train-file": "--data",
    "validation-file": "--validation-data",
    "eval-steps": "--eval-every",
    "save-steps": "--commit-every, or --snapshot-every to keep older states too",
    "save-total-limit": "--keep-snapshots",
    "output-dir": "--store, and hoist export when it is trained",
    "resume-from-checkpoint": "--store: a store that is there is resumed",
    "packing": "--pack",
    "memory": "--host-memory",
    "max-memory": "--host-memory",
    "lora-r": "--lora r=16",
    "lora-alpha": "--lora alpha=32",
    "target-modules": "--lora targets=q_proj+v_proj",
}


def named_here(option: str) -> str | None:
    """What an option of another trainer, given as ``--learning_rate``, is here; None if it is not known."""
    return _HERE.get(option.lstrip("-").replace("_", "-"))
