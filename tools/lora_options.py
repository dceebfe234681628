"""What `--lora` says: the rank of adapters and the like, parsed and checked. Making adapters is `lora.py`'s business.

Nothing heavy is imported, as the command line reads options before it knows what to load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from hoist.scheduler.errors import ConfigError

#: Instead of names: every linear layer but the head.
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """What ``--lora`` says."""

    r: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Their product is scaled by alpha / r."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the modules that get one, by their last parts; ``all-linear``: every linear layer but the head."""
    dropout: float = 0.0
    """Probability with which an adapter's inputs are dropped."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"--lora: r={self.r} is not allowed; give at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0.0):
            raise ConfigError(f"--lora: alpha={self.alpha:g} is not allowed; give a positive number")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--lora: dropout={self.dropout:g} is not allowed; give a probability from 0 to below 1")
        if not self.targets or not all(self.targets):
            raise ConfigError("--lora: targets= names nothing; give names like q_proj+v_proj, or all-linear")

    @classmethod
    def parse(cls, text: str) -> Self:
        """``r=16,alpha=32,targets=q_proj+v_proj,dropout=0``, each part optional. Raises ConfigError."""
        known = [spec.name for spec in fields(cls)]
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals or name not in known or name in values:
                raise ConfigError(
                    f"--lora: {part!r} is not one of {'=, '.join(known)}=, each once, like "
                    "r=16,alpha=32,targets=q_proj+v_proj,dropout=0"
                )
            try:
                values[name] = (
                    tuple(value.split("+")) if name == "targets" else int(value) if name == "r" else float(value)
                )
            except ValueError:
                what = "a whole number" if name == "r" else "a number"
                raise ConfigError(f"--lora: {part!r} is not {what}") from None
        return cls(**values)

    @classmethod
    def of(cls, adapter: Mapping[str, Any]) -> Self:
        """From peft's configuration, as a store keeps it; targets are then those that were found."""
        return cls(
            r=adapter["r"],
            alpha=float(adapter["lora_alpha"]),
            targets=tuple(sorted(adapter["target_modules"])),
            dropout=adapter["lora_dropout"],
        )

    def __str__(self) -> str:
        return f"r={self.r},alpha={self.alpha:g},targets={'+'.join(self.targets)},dropout={self.dropout:g}"

    def agrees(self, other: LoraOptions) -> bool:
        """Whether this asks for the same as ``other``, whose targets may be those that ``all-linear`` has found."""
        same_targets = ALL_LINEAR in self.targets or sorted(self.targets) == sorted(other.targets)
        return same_targets and (self.r, self.alpha, self.dropout) == (other.r, other.alpha, other.dropout)
