"""How long layers must sleep so that computing is to I/O here as it is on a named machine. Arithmetic alone.

What is published of a machine gives both of its times for one layer; the ratio of the two is kept, with a layer and a
drive that are this benchmark's. What then happens is measured by `sleep.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Of a parameter trained in bf16, a step, layer-major, nothing kept in memory: 2 for the forward, 2 for the backward,
#: 12 for the update (both halves of the weight and two moments in float32), which writes 12.
THERE_READ_BYTES, THERE_WRITTEN_BYTES = 2 + 2 + 12, 12
#: The same in float32, as sleeping layers are trained: both halves of the weight each time.
HERE_READ_BYTES, HERE_WRITTEN_BYTES = 4 + 4 + 12, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A machine and what it trains. Rates are published ones."""

    accelerator: str
    flops: float
    """Dense bf16 products with float32 sums, FLOP/s."""
    flops_source: str
    utilisation: float
    """Share of ``flops`` that a layer is taken to reach: an assumption."""
    model: str
    hidden: int
    intermediate: int
    seq_len: int
    micro_batch_size: int
    drive: str
    num_drives: int
    read_bytes_per_second: float
    """Sequential, of one drive."""
    write_bytes_per_second: float
    drive_source: str

    @property
    def layer_parameters(self) -> int:
        """Of a Llama layer with as many heads for keys as for queries: 4 H^2 + 3 H I and two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.seq_len * self.micro_batch_size

    @property
    def forward_flops(self) -> int:
        """Of a layer and a token: 2 a parameter, and 4 H for each token attended to, on average half the sequence."""
        return 2 * self.layer_parameters + 2 * self.hidden * self.seq_len

    @property
    def forward_seconds(self) -> float:
        """Of a layer and a micro-batch."""
        return self.forward_flops * self.tokens / (self.flops * self.utilisation)

    @property
    def backward_seconds(self) -> float:
        """Twice the forward, beside the forward that it repeats."""
        return 2.0 * self.forward_seconds

    @property
    def io_seconds(self) -> float:
        """Of a layer and a step: all drives read together, then write together, as published for each alone."""
        read = THERE_READ_BYTES * self.layer_parameters / (self.num_drives * self.read_bytes_per_second)
        write = THERE_WRITTEN_BYTES * self.layer_parameters / (self.num_drives * self.write_bytes_per_second)
        return read + write

    @property
    def in_words(self) -> str:
        """For people."""
        rate = f"{self.read_bytes_per_second / 1e9:g} and {self.write_bytes_per_second / 1e9:g} GB/s"
        return (
            f"{self.accelerator}, {self.flops / 1e12:g} TFLOP/s of dense bf16 ({self.flops_source}) at "
            f"{self.utilisation:.0%}; a layer of {self.model}, {self.layer_parameters / 1e6:.1f} M parameters, "
            f"{self.tokens:,} tokens a micro-batch, {self.forward_flops / 1e9:.3f} GFLOP a token: "
            f"{self.forward_seconds * 1e3:.1f} ms forward, twice that backward; {self.num_drives} x {self.drive}, "
            f"{rate} ({self.drive_source}), {THERE_READ_BYTES} bytes read and {THERE_WRITTEN_BYTES} written a "
            f"parameter and step: {self.io_seconds * 1e3:.0f} ms"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A preset on another drive, with another layer."""

    forward_seconds: float
    backward_seconds: float
    scale: float
    """Seconds here for one there."""
    layer_elements: int
    io_seconds: float
    """Of a layer and a step, here."""


def bytes_here(layer_elements: int) -> tuple[int, int]:
    """What a layer of this benchmark reads and writes in a step, with nothing kept in memory."""
    return HERE_READ_BYTES * layer_elements, HERE_WRITTEN_BYTES * layer_elements


def scaled(preset: Preset, *, layer_elements: int, io_seconds: float) -> Scaled:
    """The sleep of a layer of ``layer_elements`` that this drive reads and writes in ``io_seconds`` a step.

    What a layer computes for a micro-batch, over its I/O of a step, is then what it is for the preset, so any number of
    micro-batches is as far from being bound by I/O as it would be there. Raises ValueError if ``io_seconds`` is not
    positive.
    """
    if not io_seconds > 0.0:
        raise ValueError(f"io_seconds: got {io_seconds}, must be positive")
    scale = io_seconds / preset.io_seconds
    return Scaled(
        forward_seconds=preset.forward_seconds * scale,
        backward_seconds=preset.backward_seconds * scale,
        scale=scale,
        layer_elements=layer_elements,
        io_seconds=io_seconds,
    )


def figures(preset: Preset, found: Scaled) -> Mapping[str, Any]:
    """Every number that the sleep was made from, for an outcome."""
    return {
        **asdict(preset),
        "layer_parameters": preset.layer_parameters,
        "tokens": preset.tokens,
        "forward_flops": preset.forward_flops,
        "forward_seconds": preset.forward_seconds,
        "backward_seconds": preset.backward_seconds,
        "io_seconds": preset.io_seconds,
        "read_bytes_per_parameter": THERE_READ_BYTES,
        "written_bytes_per_parameter": THERE_WRITTEN_BYTES,
        "here": {
            **asdict(found),
            "read_bytes_per_parameter": HERE_READ_BYTES,
            "written_bytes_per_parameter": HERE_WRITTEN_BYTES,
        },
    }


def in_words(name: str, preset: Preset, found: Scaled) -> str:
    """The same for people."""
    return (
        f"{name}: {preset.in_words}. Here a layer of {found.layer_elements / 1e6:.1f} M parameters in float32, "
        f"{HERE_READ_BYTES} bytes read and {HERE_WRITTEN_BYTES} written, takes this drive "
        f"{found.io_seconds * 1e3:.0f} ms, so it sleeps {found.forward_seconds * 1e3:.2f} ms forward and "
        f"{found.backward_seconds * 1e3:.2f} ms backward"
    )


PRESETS: Mapping[str, Preset] = {
    "a100-2drives": Preset(
        accelerator="NVIDIA A100 80GB",
        flops=312e12,
        flops_source="NVIDIA A100 data sheet",
        utilisation=0.5,
        model="Llama 65B",
        hidden=8192,
        intermediate=22016,
        seq_len=2048,
        micro_batch_size=4,
        num_drives=2,
        drive="Samsung 990 PRO 2 TB",
        read_bytes_per_second=7.45e9,
        write_bytes_per_second=6.9e9,
        drive_source="sequential, Samsung data sheet",
    ),
    "4090-1drive": Preset(
        accelerator="NVIDIA GeForce RTX 4090",
        flops=165.2e12,
        flops_source="NVIDIA Ada GPU architecture white paper, with FP32 accumulate",
        utilisation=0.5,
        model="Llama 13B",
        hidden=5120,
        intermediate=13824,
        seq_len=2048,
        micro_batch_size=2,
        num_drives=1,
        drive="Samsung 990 PRO 2 TB",
        read_bytes_per_second=7.45e9,
        write_bytes_per_second=6.9e9,
        drive_source="sequential, Samsung data sheet",
    ),
}
