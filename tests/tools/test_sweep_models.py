"""docs/models.md says what a sweep finds: a sample is tried again here, everything in the slow run.

How a forward is cut is tested in `tests/scheduler/test_stages.py`; here whole families train in a store and in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hoist.tools.sweep_models import (
    DIFFERENT,
    EXACT,
    REFUSED,
    ROUNDED,
    UNTRAINED,
    Result,
    document,
    main,
    read_document,
    try_model,
)
from hoist.tools.tiny_models import NUM_LAYERS, causal_lm_types, tiny_config
from tests.support.training import torch_threads

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

#: What is tried in every run: each has something that others have not.
SAMPLE = {
    "zamba2": "embeddings that every layer is given, blocks that share weights, adapters",
    "dory": "a stack that is run twice, a norm between the rounds",
    "inkling2_text": "a state that grows from layer to layer",
    "phimoe": "random numbers in the router",
    "mllama": "layers that text does not run through",
    "xlnet": "refused: not causal",
}


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        yield


def recorded() -> dict[str, Result]:
    return {result.model_type: result for result in read_document(DOCUMENT.read_text())}


def test_the_document_has_a_line_for_every_model_and_none_is_different() -> None:
    text = DOCUMENT.read_text()
    results = read_document(text)
    assert [result.model_type for result in results] == causal_lm_types()
    assert {result.outcome for result in results} == {EXACT, ROUNDED, REFUSED, UNTRAINED}
    assert document(results) == text.replace(_version_in(text), transformers.__version__)
    assert all(result.note for result in results if result.outcome in (REFUSED, UNTRAINED))


def _version_in(text: str) -> str:
    return text.split("of transformers ", 1)[1].split(",", 1)[0]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_does_what_the_document_says(model_type: str) -> None:
    found, said = try_model(model_type), recorded()[model_type]
    assert found.outcome != DIFFERENT, found.note
    works = (EXACT, ROUNDED)
    assert (found.outcome in works) == (said.outcome in works), found
    if said.outcome not in works:
        assert found.outcome == said.outcome
        assert found.note.split(";")[0] == said.note.split(";")[0]


def test_tiny_configs_are_tiny_and_keep_their_kinds_of_layers() -> None:
    config = tiny_config("gemma3_text")
    assert config.num_hidden_layers == NUM_LAYERS
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert tiny_config("qwen3_moe").num_experts == 4


def test_the_command_writes_lines_and_keeps_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "models.md"
    other = Result(model_type="gpt2", outcome=REFUSED, note="as it was")
    target.write_text(document([other]))
    assert main(["llama", "--write", str(target)]) == 0
    results = read_document(target.read_text())
    assert {result.model_type: result.outcome for result in results} == {"llama": EXACT, "gpt2": REFUSED}
    assert "| llama | LlamaForCausalLM | the same bits |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["lama"])
    assert stopped.value.code == 2
