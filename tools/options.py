"""What `hoist train` is told, from the command line, a TOML file and the store that is resumed, as one frozen record.

The record is checked as a whole and turned into the scheduler's configuration; nothing is opened here but the file.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import torch

from hoist.optim import SCHEDULE_KINDS, AdamWHyperparameters, HyperparameterError, Schedule
from hoist.scheduler.config import ClipMode, TrainerConfig
from hoist.scheduler.config import Order as Plan
from hoist.scheduler.errors import ConfigError
from hoist.tiers.io.choose import ENGINE_KINDS
from hoist.tiers.layout import CHUNK_QUANTUM_ELEMENTS
from hoist.tools.data import Order as DataOrder
from hoist.tools.dtypes import DTYPES, resolve_dtype
from hoist.tools.lora_options import LoraOptions
from hoist.tools.rows import RowRules, extra_inputs
from hoist.tools.sizes import parse_bytes
from hoist.tools.split import LARGEST_SHARE

Attention = Literal["sdpa", "eager"]
#: No drive is rated for less (bytes): a unit is missing. Nor for more.
LEAST_TBW_BYTES, MOST_TBW_BYTES = 10**9, 10**21
#: When the store's bytes are compared with their checksums.
Verify = Literal["resume", "always", "never"]

#: What the options are when no model is named: a small model on text that every machine has, in about two minutes, with
#: states several times as large as the budget.
DEFAULT_JOB: Mapping[str, Any] = {
    "model": "tiny",
    "host_memory": "32MiB",
    "seq_len": 128,
    "micro_batch_size": 2,
    "micro_batches": 4,
    "steps": 70,
    "lr": 1e-3,
    "lr_schedule": "cosine",
    "warmup_steps": 10,
    "order": "shuffle",
}
#: What `--delay` may be instead of a share, and `--dtype` instead of a type.
AUTO = "auto"
#: Values that an option may have, where they can be listed.
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "lr_schedule": SCHEDULE_KINDS,
    "order": get_args(DataOrder),
    "plan": get_args(Plan),
    "dtype": (AUTO, *DTYPES),
    "attention": get_args(Attention),
    "clip_mode": get_args(ClipMode),
    "io": ENGINE_KINDS,
    "verify": get_args(Verify),
    "token_bytes": (2, 4),
}
#: Smallest whole numbers that an option may be.
MINIMA: Mapping[str, int] = {
    "seq_len": 2,  # a label needs a token before it
    "micro_batch_size": 1,
    "micro_batches": 1,
    "steps": 0,
    "warmup_steps": 0,
    "commit_every": 0,
    "snapshot_every": 0,
    "keep_snapshots": 0,
    "eval_every": 0,
    "eval_batches": 0,
    "seed": 0,
    "loss_slice_tokens": 0,
    "weight_buffers": 2,
}
#: Options that belong to one call of the command, not to the run: the store does not remember them.
NOT_REMEMBERED = frozenset(
    {
        "store", "metrics", "tensorboard", "trace", "fresh", "io", "verify", "max_chunk_elements", "dry_run", "given",
        "tbw",  # the ledger keeps it
    }
)
#: Remembered options that do not change what comes out: a resume with others needs no mention.
WITHOUT_EFFECT = frozenset(
    {
        "host_memory", "plan", "delay", "clip_mode", "residency", "commit_every", "commit_minutes", "snapshot_every",
        "keep_snapshots", "token_bytes", "eval_every", "eval_batches", "write_budget",
    }
)
#: What differs in these, others tell: the model's configuration, the data's content.
TOLD_ELSEWHERE = frozenset({"model", "data", "validation_data", "validation_split"})
#: What a store is made for: which tensors have moments. A resume cannot change it.
FIXED = ("train", "freeze", "lora")
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Every option of `hoist train`; a TOML file's keys are these names (dashes or underscores).

    Raises ConfigError, one line that names the option, its value and what is allowed.
    """

    model: str = "tiny"
    """A Hugging Face directory or a preset."""
    data: tuple[str, ...] = ()
    """Text, records, token files, folders; empty: the standard library's sources, if the model is ``tiny``."""
    train: tuple[str, ...] = ()
    """Patterns over parameter names: these alone are trained. Empty: all are."""
    freeze: tuple[str, ...] = ()
    """Patterns over parameter names that are not trained, whatever ``train`` says."""
    lora: str | None = None
    """Train adapters around the frozen model instead: their rank and the like, see `tools/lora_options.py`."""
    store: tuple[str, ...] = ("hoist-store",)
    """The store's directory, resumed if it is there, made if not; then one on each further drive that it spans."""
    device: str = "auto"
    """What computes: auto (an accelerator, if there is one), cpu, or a device as torch names it, like cuda:1."""
    device_memory: str = "auto"
    """Budget for the memory of an accelerator; auto: 90% of what is free there."""
    optim_device: str = "cpu"
    """What AdamW runs on: cpu, or device, also by its name: what computes, if it is an accelerator."""
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
    clip_norm: float = 0.0
    """Largest global norm of a step's gradients; 0: no clipping."""
    clip_mode: ClipMode = "exact"
    """Whether updates of a clipped step wait for its norm, or are made and taken back where that was wrong."""
    commit_every: int | None = None
    """Steps between commits; 0: steps do not count."""
    commit_minutes: float | None = None
    """Minutes between commits; 0: time does not count. Neither: 10 minutes where states are kept in memory, else 10
    steps."""
    residency: float = 1.0
    """Largest share of the states that host memory keeps from step to step."""
    snapshot_every: int = 0
    """Steps between snapshots that the run makes; 0: none."""
    keep_snapshots: int = 0
    """So many of those stay, the newest; 0: all. Others are never removed."""
    seed: int = 0
    """Seeds initial weights, the shuffle and dropout."""
    order: DataOrder = "sequential"
    """Order of the rows."""
    pack: bool = True
    """Rows are as full as can be; else each has one document and is padded."""
    isolate_documents: bool = False
    """Attention does not cross from one document of a packed row to another."""
    truncate: bool = False
    """Cut examples that are longer than a row, instead of refusing them."""
    validation_data: tuple[str, ...] = ()
    """Like ``data``, for evaluations alone."""
    validation_split: float = 0.0
    """Share of the rows that is held out of training for evaluations."""
    eval_every: int = 0
    """Steps between evaluations; 0: one at the end alone, if there is something to evaluate with."""
    eval_batches: int | None = None
    """Most micro-batches of an evaluation; 0: all there are. None: as many as a step has."""
    plan: Plan = "vertical"
    """Order of micro-batches and stages."""
    delay: str = "0"
    """Share of the optimizer's work that is done in the next step's forward (with exact clipping all), or auto."""
    weight_buffers: int = 2
    """Weight buffers that stages whose weights do not stay in memory take in turn."""
    loss_slice_tokens: int = 0
    """Most tokens whose logits exist at once; 0: as many as have 32 MiB of them, or a quarter of the hidden size."""
    dtype: str = "auto"
    """What layers compute with: float32, bfloat16, or auto (float32 on a CPU). Weights are float32 in any case."""
    compile: bool = False
    """Decoder layers are compiled by torch.compile."""
    compile_backend: str = "inductor"
    """What compiles them, of torch's backends."""
    dropout: float | None = None
    """Overrides every dropout probability of the model."""
    attention: Attention = "sdpa"
    """Attention implementation."""
    io: str = "auto"
    """I/O engine: auto, direct or kvikio."""
    verify: Verify = "resume"
    """resume: every checksum before the run goes on; always: also what it reads for updates; never: sizes alone."""
    max_chunk_elements: int = 0
    """Largest chunk of a new store in elements, a multiple of 4096; 0: 8 Mi."""
    token_bytes: int = 2
    """Width of ids in .bin files: 2 or 4."""
    metrics: str | None = None
    """File that gets one JSON object a step."""
    trace: str | None = None
    """File that gets what every lane did, for Chrome or Perfetto."""
    tensorboard: str | None = None
    """Directory that gets the same numbers as event files."""
    tbw: tuple[str, ...] = ()
    """Bytes that a drive is rated for in its life: one for each of the store's drives, or one per drive. 0: forget."""
    write_budget: str = "0"
    """Most bytes ever written to the store's drives, over all calls; the run stops before it. 0: no limit."""
    dry_run: bool = False
    """Tell what the run would take, and stop before anything is made."""
    fresh: bool = False
    """Start over in an existing store."""
    given: frozenset[str] = field(default=frozenset(), repr=False)
    """Names of the options that the user set, not left at their defaults."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{flag(name)}: {value!r} is not one of {', '.join(map(str, allowed))}")
        for name, least in MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{flag(name)}: {value} is not allowed; give at least {least}")
        if self.seed > _MAX_SEED:
            raise ConfigError(f"--seed: {self.seed} is not allowed; give 0 to {_MAX_SEED}")
        if self.max_chunk_elements < 0 or self.max_chunk_elements % CHUNK_QUANTUM_ELEMENTS:
            raise ConfigError(
                f"--max-chunk-elements: {self.max_chunk_elements} is not allowed; give a multiple of "
                f"{CHUNK_QUANTUM_ELEMENTS}, or 0 for the default"
            )
        if self.delay != AUTO and not 0.0 <= _share(self.delay) <= 1.0:
            raise ConfigError(f"--delay: {self.delay} is not allowed; give a share from 0 to 1, or auto")
        if not 0.0 <= self.residency <= 1.0:
            raise ConfigError(f"--residency: {self.residency} is not allowed; give a share from 0 to 1")
        if self.commit_minutes is not None and not 0.0 <= self.commit_minutes < math.inf:
            raise ConfigError(f"--commit-minutes: {self.commit_minutes} is not allowed; give a number of at least 0")
        if self.delay == AUTO and self.plan != "vertical":
            raise ConfigError(f"--delay: auto is not allowed with --plan {self.plan}; give a share from 0 to 1")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0.0):
            raise ConfigError(f"--clip-norm: {self.clip_norm} is not allowed; give a norm, or 0 for no clipping")
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"--dropout: {self.dropout} is not allowed; give a probability from 0 to below 1")
        if "keep_snapshots" in self.given and self.keep_snapshots and not self.snapshot_every:
            raise ConfigError(
                f"--keep-snapshots: {self.keep_snapshots} is not allowed without --snapshot-every; give both"
            )
        if self.isolate_documents and not self.pack:
            raise ConfigError(
                "--isolate-documents: is not allowed with --no-pack, whose rows have one document each; leave it out"
            )
        self._check_evaluation()
        if self.lora is not None and (self.train or self.freeze):
            raise ConfigError("--lora: is not allowed with --train or --freeze; it trains its adapters alone")
        self.lora_options()
        if not self.store:
            raise ConfigError("--store: nothing given; name a directory, or leave the option out")
        for name in ("store", "model", "metrics", "tensorboard", "trace"):
            if getattr(self, name) == "" or (name == "store" and "" in self.store):
                raise ConfigError(f"{flag(name)}: '' is not allowed; give a path")
        if self.device == "":
            raise ConfigError("--device: '' is not allowed; give auto, cpu, or a device like cuda:1")
        if re.fullmatch(r"cpu|device|(cuda|xpu)(:\d+)?", self.optim_device) is None:
            raise ConfigError(
                f"--optim-device: {self.optim_device!r} is not allowed; give cpu, device, or the name of what "
                "computes, like cuda:1"
            )
        self.host_memory_bytes()
        self.device_memory_bytes()
        self.tbw_bytes()
        self.write_budget_bytes()
        self.trainer_config()

    def _check_evaluation(self) -> None:
        if not 0.0 <= self.validation_split <= LARGEST_SHARE:
            raise ConfigError(
                f"--validation-split: {self.validation_split} is not allowed; give a share from 0 to {LARGEST_SHARE}"
            )
        if self.validation_split and self.validation_data:
            raise ConfigError(
                f"--validation-split: {self.validation_split} is not allowed with --validation-data; give one of them"
            )

    def require_validation_data(self) -> None:
        """Raise ConfigError if evaluations are asked for without anything to evaluate with; not before a resume's
        options are known."""
        for name in ("eval_every", "eval_batches"):
            value = getattr(self, name)
            if name in self.given and value and not self.validation_split and not self.validation_data:
                raise ConfigError(
                    f"{flag(name)}: {value} is not allowed without data to evaluate with; give --validation-data or "
                    "--validation-split too"
                )

    # --- where they come from -------------------------------------------------------------------------------------

    @classmethod
    def make(cls, *, config: Path | None, command_line: Mapping[str, Any]) -> Self:
        """Options from a TOML file and, stronger, the command line. If neither names a model: DEFAULT_JOB.

        Values of the command line are text, or tuples of text, or True for flags.
        """
        hints = _hints()
        told = {name: _from_text(name, value, hints[name]) for name, value in command_line.items()}
        given = {**({} if config is None else read_toml(config)), **told}
        defaults = {} if "model" in given else DEFAULT_JOB
        return cls(**{**defaults, **given}, given=frozenset(given))

    def remembered(self) -> dict[str, Any]:
        """What a store keeps of the options, as JSON: with it a resume needs none of them. Paths become absolute."""
        values = {name: value for name, value in asdict(self).items() if name not in NOT_REMEMBERED}
        for name in ("data", "validation_data"):
            values[name] = [str(Path(path).absolute()) for path in getattr(self, name)]
        values["betas"] = list(self.betas)
        return values

    def resuming(self, remembered: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """These options for a run that goes on: what the user did not give is as it was.

        Also returns what the user gave otherwise and changes the result, as ``--lr 0.001 (was 0.002)``.
        """
        known = {spec.name for spec in fields(self)} - NOT_REMEMBERED
        before = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in remembered.items()
            if name in known
        }
        given = {name: getattr(self, name) for name in self.given | {"store"}}
        now = type(self)(**{**before, **given}, given=self.given)
        for name in FIXED if remembered else ():
            if (getattr(now, name) or ()) != (before.get(name) or ()):
                raise ConfigError(
                    f"{flag(name)}: {_shown(getattr(now, name))} is not what the store was made with "
                    f"({_shown(before.get(name) or ()) or 'without it'}), and what was frozen has no moments to go on "
                    "with: leave the option out, or export the store and train the export, with another --store"
                )
        changed = tuple(
            f"{flag(name)} {_shown(getattr(now, name))} (was {_shown(value)})"
            for name, value in before.items()
            if name not in WITHOUT_EFFECT | TOLD_ELSEWHERE and getattr(now, name) != value
        )
        return now, changed

    # --- what they mean -------------------------------------------------------------------------------------------

    def host_memory_bytes(self) -> int:
        """The budget. Raises ConfigError if it is not a size."""
        return _budget("--host-memory", self.host_memory)

    def device_memory_bytes(self) -> int | None:
        """What ``--device-memory`` says; None: a share of what is free. Raises ConfigError if it is not a size."""
        return None if self.device_memory == AUTO else _budget("--device-memory", self.device_memory)

    def tbw_bytes(self) -> tuple[int, ...]:
        """What ``--tbw`` says, in bytes. Raises ConfigError."""
        try:
            rated = tuple(parse_bytes(value) for value in self.tbw)
        except ValueError as error:
            raise ConfigError(f"--tbw: {error}; a drive's rating is written like 600TB") from error
        for value, num_bytes in zip(self.tbw, rated, strict=True):
            if 0 < num_bytes < LEAST_TBW_BYTES:
                raise ConfigError(
                    f"--tbw: {value!r} is {num_bytes} bytes, less than any drive is rated for; write for instance 600TB"
                )
            if num_bytes > MOST_TBW_BYTES:
                raise ConfigError(f"--tbw: {value!r} is more than any drive is rated for; write for instance 600TB")
        return rated

    def write_budget_bytes(self) -> int | None:
        """What ``--write-budget`` says; None: no limit. Raises ConfigError."""
        try:
            return parse_bytes(self.write_budget) or None
        except ValueError as error:
            raise ConfigError(f"--write-budget: {error}") from error

    def lora_options(self) -> LoraOptions | None:
        """What ``--lora`` says; None without it. Raises ConfigError."""
        return None if self.lora is None else LoraOptions.parse(self.lora)

    @property
    def main_store(self) -> str:
        """The first of the store's directories: what the store is known by."""
        return self.store[0]

    def row_rules(self, *, pad_id: int = 0) -> RowRules:
        """How documents become rows."""
        return RowRules(seq_len=self.seq_len, pack=self.pack, isolate=self.isolate_documents, pad_id=pad_id)

    def trainer_config(self, *, device_memory_bytes: int | None = None) -> TrainerConfig:
        """The scheduler's configuration. Raises ConfigError on values that cannot be.

        ``device_memory_bytes``: the budget of a device with memory of its own, once it is known which one.
        """
        try:
            return TrainerConfig(
                host_memory_bytes=self.host_memory_bytes(),
                device_memory_bytes=device_memory_bytes,
                optim_device="cpu" if self.optim_device == "cpu" else "device",
                compile=self.compile,
                compile_backend=self.compile_backend,
                dtype=resolve_dtype(self.dtype, torch.device("cpu")),
                micro_batch_size=self.micro_batch_size,
                seq_len=self.seq_len,
                num_micro_batches=self.micro_batches,
                extra_inputs=extra_inputs(self.row_rules()),
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
                clip_norm=self.clip_norm,
                clip_mode=self.clip_mode,
                # Until it is picked there is none: it is picked by what steps without one do.
                delay=0.0 if self.delay == AUTO else _share(self.delay),
                plan=self.plan,
                seed=self.seed,
                commit_every=self.commit_every or None,
                commit_minutes=self.commit_minutes or None,
                residency=self.residency,
                resident_weights=self.residency > 0.0,
                pin_trained=self.lora is not None,
                loss_slice_tokens=self.loss_slice_tokens,
                weight_buffers=self.weight_buffers,
                verify_reads=self.verify == "always",
            )
        except HyperparameterError as error:  # begins with the field: "betas[0] must be ..."
            name = str(error).split()[0].partition("[")[0]
            raise ConfigError(f"{flag(name)}: {error}") from error


def _budget(option: str, text: str) -> int:
    """A size, in bytes. Raises ConfigError."""
    try:
        num_bytes = parse_bytes(text, minimum=1)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if text.strip().isdigit() and num_bytes < 2**20:
        raise ConfigError(f"{option}: {text} is a number of bytes; write its unit, as in 4GiB")
    return num_bytes


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _hints() -> dict[str, Any]:
    """Types of the options that a user can give."""
    return {name: hint for name, hint in typing.get_type_hints(TrainOptions).items() if name != "given"}


def _from_text(name: str, value: Any, hint: Any) -> Any:
    """A value of the command line as its option's type. Raises ConfigError."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, (list, tuple)) else value
    kind = _kind(hint)
    if name in ("store", "train", "freeze", "tbw"):
        return (value,)
    if name == "betas":
        return _parse_betas(value)
    if kind is int or kind is float:
        try:
            return kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{flag(name)}: {value!r} is not {what}") from None
    return value


def _kind(hint: Any) -> Any:
    """The type behind ``X | None`` and ``Literal``."""
    if isinstance(hint, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not types.NoneType)
    return str if get_origin(hint) is Literal else hint


def _share(text: str) -> float:
    """A number, or one that no share can be."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parse_betas(text: str) -> tuple[float, float]:
    """``0.9,0.95`` as two numbers. Raises ConfigError."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--betas: {text!r} is not two numbers with a comma between them, like 0.9,0.95") from error
    return first, second


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- TOML -----------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """Option values from a file. Raises ConfigError for an unreadable file, unknown keys, values of another type."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a TOML file that you may read") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: is not TOML ({error}); write lines like steps = 100") from error
    hints = _hints()
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"--config {path}: unknown key {key!r}{hint}; known are {', '.join(sorted(hints))}")
        if name in values:
            raise ConfigError(f"--config {path}: {name} is there twice, with a dash and an underscore; keep one")
        try:
            values[name] = _converted(name, value, hints[name])
        except TypeError as error:
            raise ConfigError(f"--config {path}: {key} is {value!r}; it must be {error}") from None
    return values


def _converted(name: str, value: Any, hint: Any) -> Any:
    """A TOML value as its option's type: lists become tuples, whole numbers serve as floats.

    Raises TypeError that says what the value must be.
    """
    if name == "betas" and isinstance(value, str):
        return _parse_betas(value)
    if name in ("data", "store", "validation_data", "train", "freeze", "tbw") and isinstance(value, str):
        return (value,)
    if name == "delay" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    expected = _kind(hint)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is float:
        if is_number and math.isfinite(value):
            return float(value)
        raise TypeError("a finite number")
    if get_origin(expected) is tuple:
        item = get_args(expected)[0]
        if isinstance(value, list) and all(_converts(item, entry) for entry in value):
            return tuple(item(entry) for entry in value)
        raise TypeError(f"a list of {_PLURALS[item]}")
    if isinstance(value, expected) and (expected is not int or is_number):
        return value
    raise TypeError(_NAMES[expected])


def _converts(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)


_NAMES = {int: "a whole number", bool: "true or false", str: "a string"}
_PLURALS = {float: "numbers", str: "strings"}
