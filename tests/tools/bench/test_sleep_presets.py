"""The sleep of a preset: its arithmetic by hand, and that computing is to I/O here as on the machine it names."""

from __future__ import annotations

import json

import pytest

from hoist.tools.bench.sleep_presets import PRESETS, Preset, bytes_here, figures, in_words, scaled

#: Numbers that can be worked out in one's head.
ROUND = Preset(
    accelerator="accelerator",
    flops=2e12,
    flops_source="here",
    utilisation=0.5,
    model="model",
    hidden=10,
    intermediate=20,
    seq_len=4,
    micro_batch_size=3,
    drive="drive",
    num_drives=2,
    read_bytes_per_second=8e3,
    write_bytes_per_second=6e3,
    drive_source="here",
)


class TestPreset:
    def test_a_layer_by_hand(self) -> None:
        assert ROUND.layer_parameters == 400 + 600 + 20
        assert ROUND.tokens == 12
        assert ROUND.forward_flops == 2 * 1020 + 2 * 10 * 4
        assert ROUND.forward_seconds == pytest.approx(2120 * 12 / 1e12)
        assert ROUND.backward_seconds == 2 * ROUND.forward_seconds
        assert ROUND.io_seconds == pytest.approx(16 * 1020 / 16e3 + 12 * 1020 / 12e3)

    def test_parameters_of_the_named_models(self) -> None:
        """Llama's published sizes, less embedding and head: 12.7 of 13.0 G, 64.8 of 65.3 G."""
        assert 40 * PRESETS["4090-1drive"].layer_parameters == pytest.approx(13.016e9 - 2 * 32000 * 5120, rel=1e-3)
        assert 80 * PRESETS["a100-2drives"].layer_parameters == pytest.approx(65.286e9 - 2 * 32000 * 8192, rel=1e-3)

    @pytest.mark.parametrize("name", PRESETS)
    def test_layers_take_milliseconds_and_bind_neither_way_for_ever(self, name: str) -> None:
        preset = PRESETS[name]
        assert 0.01 < preset.forward_seconds < 0.2
        computing = preset.forward_seconds * 2 + preset.backward_seconds
        assert computing < preset.io_seconds < 32 * computing


class TestScaled:
    @pytest.mark.parametrize("name", PRESETS)
    @pytest.mark.parametrize("io_seconds", [0.01, 0.4])
    def test_computing_is_to_io_as_on_the_machine(self, name: str, io_seconds: float) -> None:
        preset = PRESETS[name]
        found = scaled(preset, layer_elements=2**24, io_seconds=io_seconds)
        assert found.forward_seconds / io_seconds == pytest.approx(preset.forward_seconds / preset.io_seconds)
        assert found.backward_seconds == pytest.approx(2 * found.forward_seconds)
        assert found.scale == pytest.approx(io_seconds / preset.io_seconds)

    def test_float32_moves_a_seventh_more_than_bf16(self) -> None:
        assert bytes_here(1000) == (20_000, 12_000)
        assert sum(bytes_here(7)) / 7 == pytest.approx((16 + 12) * 8 / 7)

    @pytest.mark.parametrize("io_seconds", [0.0, -1.0, float("nan")])
    def test_a_drive_that_takes_no_time_is_refused(self, io_seconds: float) -> None:
        with pytest.raises(ValueError, match="io_seconds"):
            scaled(ROUND, layer_elements=4096, io_seconds=io_seconds)

    def test_everything_used_is_told(self) -> None:
        found = scaled(ROUND, layer_elements=4096, io_seconds=0.5)
        told = json.loads(json.dumps(figures(ROUND, found)))
        work = told["forward_flops"] * told["tokens"] / (told["flops"] * told["utilisation"])
        here = told["here"]
        assert here["forward_seconds"] == pytest.approx(work * here["io_seconds"] / told["io_seconds"])
        assert "2 x drive, 8e-06 and 6e-06 GB/s (here), 16 bytes read and 12 written" in in_words("round", ROUND, found)
