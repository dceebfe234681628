"""hoist trains language models whose states do not fit in memory: from NVMe, layer by layer, exactly.

This module holds the public names only, each loaded when it is first used; docs/architecture.md says what lies where.
"""

import os as _os
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from hoist._version import __version__

# In a checkout the sub-packages lie beside this folder (setup.cfg maps them into it when it is installed).
_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "setup.cfg").is_file() and (_checkout / "tiers" / "py.typed").is_file():
    __path__.append(str(_checkout))

# Two lanes compute at the same time, each with OpenMP's threads, and those that wait at the end of a loop spin on the
# cores that the others need. GNU's library, which torch brings, is told to spin only briefly (docs/tuning.md). It reads
# this when torch is loaded.
if "OMP_WAIT_POLICY" not in _os.environ:
    _os.environ.setdefault("GOMP_SPINCOUNT", "1000")

#: Where each public name is defined. Loading them all takes seconds (torch, transformers), so each waits for its use.
_HOMES = {
    "AdamWHyperparameters": "hoist.optim",
    "EvalMetrics": "hoist.scheduler.metrics",
    "HoistError": "hoist.tiers.errors",
    "LoraOptions": "hoist.tools.lora_options",
    "Schedule": "hoist.optim",
    "StepMetrics": "hoist.scheduler.metrics",
    "Store": "hoist.tiers.store",
    "Trainer": "hoist.scheduler.trainer",
    "TrainerConfig": "hoist.scheduler.config",
    "choose_engine": "hoist.tiers.io",
    "export_store": "hoist.tools.export",
    "inspect_store": "hoist.tools.inspection.looking",
    "open_trainer": "hoist.tools.opening",
    "read_metrics": "hoist.scheduler.metrics_log",
    "read_tensor": "hoist.tools.read_tensor",
    "stage_modules": "hoist.scheduler.module_stages",
}

if TYPE_CHECKING:
    from hoist.optim import AdamWHyperparameters, Schedule
    from hoist.scheduler.config import TrainerConfig
    from hoist.scheduler.metrics import EvalMetrics, StepMetrics
    from hoist.scheduler.metrics_log import read_metrics
    from hoist.scheduler.module_stages import stage_modules
    from hoist.scheduler.trainer import Trainer
    from hoist.tiers.errors import HoistError
    from hoist.tiers.io import choose_engine
    from hoist.tiers.store import Store
    from hoist.tools.export import export_store
    from hoist.tools.inspection.looking import inspect_store
    from hoist.tools.lora_options import LoraOptions
    from hoist.tools.opening import open_trainer
    from hoist.tools.read_tensor import read_tensor
else:

    def __getattr__(name):
        """Load a public name from its module."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(_HOMES[name]), name)
        return value

    def __dir__():
        """The public names, loaded or not."""
        return sorted({*globals(), *_HOMES})


__all__ = [
    "AdamWHyperparameters",
    "EvalMetrics",
    "HoistError",
    "LoraOptions",
    "Schedule",
    "StepMetrics",
    "Store",
    "Trainer",
    "TrainerConfig",
    "__version__",
    "choose_engine",
    "export_store",
    "inspect_store",
    "open_trainer",
    "read_metrics",
    "read_tensor",
    "stage_modules",
]
