"""`hoist train` on records: formats, rows and resumes end to end, and every kind of bad input in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hoist.tools.data import DataPosition, Order, StepData, prepare
from hoist.tools.presets import load_model_source
from hoist.tools.rows import RowRules
from tests.support.commands import Job, Result, curve, hoist, make_job, read_metrics, tree
from tests.support.tokenizers import CHATML, save_tokenizer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "returns", "self", "value", "one")


def chats(count: int) -> list[dict[str, Any]]:
    """Short conversations, all different."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{WORDS[number % 13]} {number}"},
                {"role": "assistant", "content": " ".join(WORDS[number % 7 : number % 7 + 1 + number % 4])},
            ]
        }
        for number in range(count)
    ]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@dataclass(kw_only=True, slots=True)
class Shell:
    """A job with a chat tokenizer, whose rows have 64 tokens."""

    job: Job
    capfd: pytest.CaptureFixture[str]

    def train(self, data: Path, *more: object, store: object = "store", steps: object = 3, **options: object) -> Result:
        place = self.job.folder / str(store)
        told = {"seq_len": 64, "metrics": self.job.folder / f"{store}.jsonl", "data": data, "steps": steps, **options}
        return hoist(self.capfd, *self.job.arguments(*more, store=place, **told))

    def refused(self, data: Path, *more: object, **options: object) -> str:
        """The line of a refusal, which has changed nothing."""
        before = tree(self.job.folder)
        line = self.train(data, *more, metrics=None, **options).refusal()
        assert tree(self.job.folder) == before
        return line

    def curve(self, store: str = "store") -> list[tuple[int, float, float, float]]:
        return curve(self.job.folder / f"{store}.jsonl")


@pytest.fixture
def shell(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    job = make_job(tmp_path)
    save_tokenizer(job.model, template=CHATML)
    return Shell(job=job, capfd=capfd)


@pytest.mark.parametrize("more", [[], ["--no-pack"]], ids=["packed", "padded"])
def test_conversations_train_and_are_resumed(shell: Shell, more: list[str]) -> None:
    data = write(shell.job.folder / "chats.jsonl", chats(40))
    whole = shell.train(data, *more, "--order", "shuffle", store="whole", steps=4)
    assert whole.code == 0, whole.err
    (found,) = re.findall(r" tokens, (\d+) rows; a step takes 4, so [\d.]+ steps are one epoch", whole.out)
    assert int(found) == 40 if more else 10 < int(found) < 30
    assert "; its text is read with the tokenizer in " in whole.out
    losses = [loss for _, loss, _, _ in shell.curve("whole")]
    assert all(3 < loss < 8 for loss in losses)
    assert shell.train(data, *more, "--order", "shuffle", store="parts", steps=2).code == 0
    resumed = hoist(
        shell.capfd, "train", "--store", shell.job.folder / "parts", "--steps", 4, "--metrics",
        shell.job.folder / "parts.jsonl",
    )  # fmt: skip
    assert resumed.code == 0, resumed.err
    assert "not the data" not in resumed.out
    assert shell.curve("parts") == shell.curve("whole")
    other = write(shell.job.folder / "other.jsonl", [{"prompt": "a", "completion": "b"}] * 400)
    changed = hoist(shell.capfd, "train", "--store", shell.job.folder / "parts", "--steps", 5, "--data", other)
    assert "note     --data: not the data of the stored run (fingerprint " in changed.out


def test_fewer_tokens_than_a_row_s_are_counted_as_they_are(shell: Shell) -> None:
    data = write(shell.job.folder / "pairs.jsonl", [{"prompt": "the", "completion": "fox"}] * 12)
    assert shell.train(data, "--no-pack", steps=1).code == 0
    (line,) = read_metrics(shell.job.folder / "store.jsonl")
    source = load_model_source(str(shell.job.model))
    assert source.tokenizer is not None
    ids = [identifier for text in ("the", "fox") for identifier in source.tokenizer.encode(text)]
    assert line["tokens"] == 4 * (len(ids) + 1)


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
@pytest.mark.parametrize("pack", [True, False])
def test_the_same_examples_in_the_same_order(tmp_path: Path, order: Order, pack: bool) -> None:
    """A run that is resumed in the middle of an epoch, or at its end, takes what one in one go takes."""
    data = write(tmp_path / "a.jsonl", [{"prompt": f"{n} ", "completion": "is a number"} for n in range(24)])
    rows = prepare(
        [data], tokenizer=None, vocab_size=256, cache_directory=tmp_path / "cache",
        rules=RowRules(seq_len=40, pack=pack),
    )  # fmt: skip

    def steps(after: DataPosition | None = None) -> StepData:
        return StepData(
            rows, order=order, seed=3, micro_batch_size=2, num_micro_batches=2, validation_share=0.25, after=after
        )

    whole = steps()
    epoch = whole.held_out.num_training
    seen = [row for step in range(1, 10) for row in whole.row_numbers(step)]
    assert sorted(seen[:epoch]) == [whole.held_out.training(number) for number in range(epoch)]
    for stop in range(9):
        resumed = steps(DataPosition.from_json(json.loads(json.dumps(whole.position(stop)))))
        assert [row for step in range(stop + 1, 10) for row in resumed.row_numbers(step)] == seen[4 * stop :]
        for mine, theirs in zip(resumed.step(stop + 1), whole.step(stop + 1), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_documents_are_kept_apart_where_the_model_can(shell: Shell) -> None:
    data = write(shell.job.folder / "chats.jsonl", chats(40))
    apart = shell.train(data, "--isolate-documents", store="apart")
    assert apart.code == 0, apart.err
    assert shell.train(data, store="across").code == 0
    assert [loss for _, loss, _, _ in shell.curve("apart")] != [loss for _, loss, _, _ in shell.curve("across")]
    refused = shell.refused(data, "--isolate-documents", "--no-pack")
    assert refused.startswith("--isolate-documents: is not allowed with --no-pack")
    assert "as --isolate-documents needs; leave it out" in shell.refused(shell.job.data, "--isolate-documents")
    (shell.job.folder / "opt").mkdir()
    other = replace(shell, job=make_job(shell.job.folder / "opt", family="opt"))
    assert other.refused(other.job.data, "--isolate-documents", seq_len=16) == (
        "--isolate-documents: OPTForCausalLM: layer.0 mixes the documents of a packed row, wherever positions begin "
        "anew; leave it out, or give --no-pack"
    )


def test_truncate(shell: Shell) -> None:
    long = {"prompt": "the", "completion": "fox " * 100}
    data = write(shell.job.folder / "a.jsonl", [*[{"prompt": "the", "completion": "dog"}] * 40, long])
    assert "a.jsonl: line 41: has " in shell.refused(data)
    done = shell.train(data, "--truncate", steps=1)
    assert "note     --truncate: 1 examples were cut to --seq-len tokens\n" in done.out


# --- bad input --------------------------------------------------------------------------------------------------------


def raw(content: bytes, name: str = "bad.jsonl") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def after_a_good_one(record: object, name: str = "bad.jsonl") -> Callable[[Path], Path]:
    return raw(f"{json.dumps(chats(1)[0])}\n{json.dumps(record)}\n".encode(), name)


def token_file(folder: Path) -> Path:
    np.save(folder / "bad.npy", np.asarray([3, 503, 5], dtype=np.uint16))
    return folder / "bad.npy"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (raw(b""), "the file is empty; it needs at least one record"),
        (raw(b"", "bad.txt"), "the file is empty; give some text"),
        (raw(b"\n \n"), "the file is empty; it needs at least one record"),
        (raw(b"[]", "bad.json"), "the file is empty; it needs at least one record"),
        (raw(b'{"text": "\xe9"}\n'), "line 1: no UTF-8 at byte 11 (0xe9); convert the file"),
        (after_a_good_one(0, "bad.ndjson"), "line 2: is a number, not a JSON object; write records like"),
        (raw(b'{"text": "a"}\n{"text": \n'), "line 2: no JSON at column 1"),
        (after_a_good_one({"text": "a"}), "line 2: has no 'messages', and the first record (line 1) has messages; all"),
        (after_a_good_one({"messages": "a"}), "line 2: messages is a string, must be a list of messages"),
        (
            after_a_good_one({"messages": [{"role": "bot", "content": "a"}]}),
            "line 2: message 1: unknown role 'bot'; known are system, developer, user, assistant, tool",
        ),
        (
            after_a_good_one({"messages": [{"role": "user", "content": "a"}]}),
            "line 2: has no assistant turn, so nothing to learn; leave the record out",
        ),
        (
            after_a_good_one({"messages": [*chats(1)[0]["messages"], {"role": "assistant", "content": "z" * 99}]}),
            "line 2: has ",
        ),
        (token_file, "token 1 is 503, allowed are 0 to 502"),
    ],
)  # fmt: skip
def test_bad_input_is_told_by_file_and_line(shell: Shell, make: Callable[[Path], Path], message: str) -> None:
    data = make(shell.job.folder)
    line = shell.refused(data)
    assert line.startswith(f"--data {data}: {message}")


def test_rows_longer_than_the_model_s_positions(shell: Shell) -> None:
    data = write(shell.job.folder / "a.jsonl", chats(40))
    assert shell.refused(data, seq_len=65) == (
        f"--seq-len: 65 is more than the 64 positions (max_position_embeddings) of --model {shell.job.model}; give at "
        "most 64"
    )


def test_a_tokenizer_of_another_model(shell: Shell) -> None:
    (shell.job.folder / "small").mkdir()
    small = make_job(shell.job.folder / "small", vocab_size=300)
    save_tokenizer(small.model, template=CHATML)
    data = write(shell.job.folder / "a.jsonl", chats(40))
    line = replace(shell, job=small).refused(data)
    assert "a.jsonl: line 3: token " in line
    assert "allowed are 0 to 299 (the model's vocab_size is 300); its tokenizer belongs to another model" in line
