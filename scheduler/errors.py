"""Refusals of the scheduler: a model that cannot be split, a configuration that cannot be honoured.

What fails during a step is not here: the tiers raise their own errors, see `tiers/errors.py`.
"""

from __future__ import annotations

from hoist.tiers.errors import HoistError, RefusalError


class ModelError(RefusalError):
    """The model cannot be trained stage by stage; the message names the model and what stands in the way."""


class ConfigError(RefusalError):
    """A setting has a value that cannot be honoured; the message names it, the value and what is allowed."""


class CompileError(RefusalError, RuntimeError):
    """torch's compiler cannot compile the layers, or lacks what it needs; the message says what to do instead."""


class MisuseError(ConfigError, AttributeError):
    """A trainer was asked for what it does not have; the message says where that is."""


class NonFiniteGradientError(HoistError, ArithmeticError):
    """The gradients of too many steps in a row were infinite or NaN; none of these steps changed the weights."""
