"""What `hoist train` is told, from the command line and a TOML file, as one frozen record.

The record is checked as a whole and turned into the scheduler's configuration; nothing is opened here.
"""

from __future__ import annotations

import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hoist.optim import SCHEDULE_KINDS, AdamWHyperparameters, HyperparameterError, Schedule
from hoist.scheduler.config import TrainerConfig
from hoist.scheduler.errors import ConfigError
from hoist.tools.sizes import parse_bytes

Attention = Literal["sdpa", "eager"]
DataOrder = Literal["sequential", "shuffle"]
Plan = Literal["vertical", "horizontal"]


#: What the options are when no model is named: a small model on text that every machine has, in about two minutes,
#: with states several times as large as the budget.
DEFAULT_JOB: Mapping[str, Any] = {
    "model": "tiny",
    "host_memory": "32MiB",
    "seq_len": 128,
    "micro_batch_size": 2,
    "micro_batches": 4,
    "steps": 100,
    "lr": 1e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 10,
    "order": "shuffle",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Every option of `hoist train`; a TOML file's keys are these names (dashes or underscores)."""

    model: str = "tiny"
    """A Hugging Face directory or a preset."""
    data: tuple[str, ...] = ()
    """Token files, text files, folders; empty: the standard library's sources, if the model is ``tiny``."""
    store: str = "hoist-store"
    """The store's directory: resumed if it is there, made if not."""
    host_memory: str = "4GiB"
    """Budget for host memory beyond the baseline of the process."""
    seq_len: int = 1024
    """Tokens of a row."""
    micro_batch_size: int = 2
    """Rows of a micro-batch."""
    micro_batches: int = 16
    """Micro-batches of a step."""
    steps: int = 1000
    """Steps of the whole run, counted from its first; 0 makes the store and stops."""
    lr: float = 1e-4
    """Peak learning rate."""
    lr_schedule: str = "constant"
    """constant, linear or cosine."""
    warmup_steps: int = 0
    """Steps of linear rise."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled decay."""
    no_decay_norms: bool = False
    """Leave biases and norms without decay."""
    commit_every: int = 10
    """Steps between commits."""
    seed: int = 0
    """Seeds initial weights, the shuffle and dropout."""
    order: DataOrder = "sequential"
    """Order of the windows."""
    plan: Plan = "vertical"
    """Order of micro-batches and stages."""
    dtype: str = "auto"
    """Compute dtype: auto or float32 (auto means float32 on a CPU)."""
    dropout: float | None = None
    """Overrides every dropout probability of the model."""
    attention: Attention = "sdpa"
    """Attention implementation."""
    io: str = "auto"
    """I/O engine: auto, direct or kvikio."""
    max_chunk_elements: int = 0
    """Largest chunk of a new store in elements, a multiple of 4096; 0: 8 Mi."""
    token_bytes: int = 2
    """Width of ids in .bin files: 2 or 4."""
    metrics: str | None = None
    """File that gets one JSON object a step."""
    fresh: bool = False
    """Start over in an existing store."""
    given: frozenset[str] = field(default=frozenset(), repr=False)
    """Names of the options that the user set, not left at their defaults."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            allowed = _allowed_values(spec.type, type(self))
            if allowed and value not in allowed:
                raise ConfigError(f"{flag(spec.name)}: {value!r} is not one of {', '.join(map(str, allowed))}")
        if self.lr_schedule not in SCHEDULE_KINDS:
            raise ConfigError(f"--lr-schedule: {self.lr_schedule!r} is not one of {', '.join(SCHEDULE_KINDS)}")
        if self.dtype not in ("auto", "float32"):
            raise ConfigError(f"--dtype: {self.dtype!r} is not one of auto, float32 (other types need a GPU)")
        if self.token_bytes not in (2, 4):
            raise ConfigError(f"--token-bytes: {self.token_bytes} is not one of 2, 4")
        if self.steps < 0:
            raise ConfigError(f"--steps: {self.steps} is negative; 0 makes the store and stops")
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--dropout: {self.dropout} is not a probability from 0 to below 1")
        self.host_memory_bytes()
        self.trainer_config()

    @classmethod
    def make(cls, *, config: Path | None, command_line: Mapping[str, Any]) -> Self:
        """Options from a TOML file and, stronger, the command line. If neither names a model: :data:`DEFAULT_JOB`."""
        options = cls() if config is None else cls.from_toml(config)
        given = options.given | frozenset(command_line)
        values = {name: getattr(options, name) for name in options.given} | dict(command_line)
        defaults = {} if "model" in given else DEFAULT_JOB
        return cls(**{**defaults, **values}, given=given)

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Options from a file. Raises ConfigError for an unreadable file, an unknown key, or a value of another type."""
        try:
            document = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--config {path}: cannot be read: {error}") from error
        known = {spec.name: spec for spec in fields(cls) if spec.name != "given"}
        values: dict[str, Any] = {}
        for key, value in document.items():
            name = key.replace("-", "_")
            if name not in known:
                raise ConfigError(f"--config {path}: unknown key {key!r}; known are {', '.join(sorted(known))}")
            values[name] = _converted(path, key, value, known[name].type)
        return cls(**values, given=frozenset(values))

    def host_memory_bytes(self) -> int:
        """The budget. Raises ConfigError if it is not a size."""
        try:
            return parse_bytes(self.host_memory)
        except ValueError as error:
            raise ConfigError(f"--host-memory: {error}") from error

    def trainer_config(self) -> TrainerConfig:
        """The scheduler's configuration. Raises ConfigError on values that cannot be."""
        try:
            return TrainerConfig(
                host_memory_bytes=self.host_memory_bytes(),
                micro_batch_size=self.micro_batch_size,
                seq_len=self.seq_len,
                num_micro_batches=self.micro_batches,
                optimizer=AdamWHyperparameters(
                    lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
                ),
                schedule=Schedule(
                    kind=typing.cast(Any, self.lr_schedule),
                    lr=self.lr,
                    warmup_steps=self.warmup_steps,
                    num_steps=self.steps,
                ),
                no_decay_norms=self.no_decay_norms,
                plan=self.plan,
                seed=self.seed,
                commit_every=self.commit_every,
            )
        except HyperparameterError as error:
            raise ConfigError(str(error)) from error


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _allowed_values(annotation: Any, owner: type) -> tuple[Any, ...]:
    hint = typing.get_type_hints(owner).get("", None) if annotation is None else annotation
    resolved = globals().get(hint, hint) if isinstance(hint, str) else hint
    return get_args(resolved) if typing.get_origin(resolved) is Literal else ()


def _converted(path: Path, key: str, value: Any, annotation: Any) -> Any:
    """A TOML value as its option's type: lists become tuples, whole numbers serve as floats."""
    hint = typing.get_type_hints(TrainOptions)[key.replace("-", "_")]
    options = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, (list, str)):
            return (value,) if isinstance(value, str) else tuple(value)
        if typing.get_origin(option) is Literal and isinstance(value, str):
            return value
        if isinstance(option, type) and isinstance(value, option) and not (option is int and isinstance(value, bool)):
            return value
    raise ConfigError(f"--config {path}: {key} is {value!r}, which is not a {getattr(hint, '__name__', hint)}")
