"""Records become ids and labels: what counts is what the model is to say, whatever the format; and their cache."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoist.tools.errors import DataError
from hoist.tools.examples import EncodedRecords, encode_files
from hoist.tools.text import BLOCK_CHARACTERS, ByteTokenizer, ModelTokenizer, TextTokenizer
from hoist.tools.tokens import Part
from tests.support.tokenizers import CHATML, MARKED, UNSTABLE, VOCABULARY, save_tokenizer

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the quick"},
    {"role": "assistant", "content": "brown fox"},
    {"role": "user", "content": "jumps \u00e9?"},
    {"role": "assistant", "content": "over the\nlazy dog"},
]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def encode(
    *paths: Path, tokenizer: TextTokenizer | None = None, longest: int = 512, truncate: bool = False
) -> EncodedRecords:
    return encode_files(
        paths, tokenizer=tokenizer or ByteTokenizer(), vocab_size=VOCABULARY, cache_directory=paths[0].parent / "cache",
        longest=longest, truncate=truncate,
    )  # fmt: skip


def documents(part: Part) -> list[tuple[list[int], list[bool]]]:
    """Ids and what counts, document by document, read as an outsider would."""
    ids = np.load(part.ids.path)
    counted = np.ones(len(ids), dtype=bool) if part.counted is None else np.load(part.counted.path) == 1
    assert part.documents is not None
    bounds = np.load(part.documents.path).tolist()
    assert bounds[-1] == len(ids)
    return [(ids[first:last].tolist(), counted[first:last].tolist()) for first, last in pairwise(bounds)]


def learned(tokenizer: ModelTokenizer, document: tuple[list[int], list[bool]]) -> list[str]:
    """The runs of ids that count, as text."""
    runs: list[list[int]] = []
    before = False
    for identifier, counts in zip(*document, strict=True):
        if counts:
            runs = runs if before else [*runs, []]
            runs[-1].append(identifier)
        before = counts
    return [tokenizer.load().decode(run) for run in runs]


def test_text_counts_whole_and_ends_with_the_separator(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "ab", "id": 7}, {"text": ""}, {"text": "c\u00e9"}])
    found = encode(path)
    assert documents(found.part) == [([97, 98, 0], [True] * 3), ([99, 0xC3, 0xA9, 0], [True] * 4)]
    assert (found.num_empty, found.part.whole, found.part.counted) == (1, False, None)


def test_long_texts_are_tokenized_in_blocks(tmp_path: Path) -> None:
    text = "a line of text\n" * (BLOCK_CHARACTERS // 5)
    (document,) = documents(encode(write(tmp_path / "a.jsonl", [{"text": text}])).part)
    assert bytes(document[0]) == text.encode() + b"\0"


def test_only_the_completion_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "de"}])
    found = encode(path)
    assert documents(found.part) == [
        ([97, 98, 99, 0], [False, False, True, True]),
        ([100, 101, 0], [False, True, True]),  # nothing comes before the first
    ]
    assert found.part.whole


def test_a_prompt_begins_as_the_tokenizer_has_it(tmp_path: Path) -> None:
    """Where it puts a beginning of sequence before what it encodes, one is there; the two are encoded apart."""
    from tokenizers.processors import TemplateProcessing

    directory = save_tokenizer(tmp_path / "model")
    tokenizer = ModelTokenizer(directory)
    loaded = tokenizer.load()
    loaded.bos_token = "<|im_start|>"
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", loaded.bos_token_id)]
    )
    path = write(tmp_path / "a.jsonl", [{"prompt": "the ", "completion": "quick"}])
    ((ids, counted),) = documents(encode(path, tokenizer=tokenizer).part)
    prompt = loaded.encode("the ")
    completion = loaded.encode("quick", add_special_tokens=False)
    assert prompt[0] == loaded.bos_token_id
    assert ids == [*prompt, *completion, loaded.eos_token_id]
    assert counted == [False] * len(prompt) + [True] * (len(completion) + 1)


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_the_assistant_s_turns_count(tmp_path: Path, template: str, end: str) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", template=template))
    (document,) = documents(encode(write(tmp_path / "a.jsonl", [{"messages": TURNS}]), tokenizer=tokenizer).part)
    whole = tokenizer.load().apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert document[0] == whole
    assert learned(tokenizer, document) == [f"brown fox{end}", f"over the\nlazy dog{end}"]


def test_sharegpt_and_alpaca_are_the_same_conversations(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", template=CHATML))
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS[1:]]
    share = encode(write(tmp_path / "s.jsonl", [{"conversations": turns, "system": "be brief"}]), tokenizer=tokenizer)
    plain = encode(write(tmp_path / "m.jsonl", [{"messages": TURNS}]), tokenizer=tokenizer)
    assert documents(share.part) == documents(plain.part)
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": "add", "input": "1 2", "output": "3"}, {"instruction": "hi", "output": "ho"}])
    )
    alpaca = documents(encode(tmp_path / "alpaca.json", tokenizer=tokenizer).part)
    chats = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in (("add\n\n1 2", "3"), ("hi", "ho"))
    ]
    assert alpaca == documents(encode(write(tmp_path / "c.jsonl", chats), tokenizer=tokenizer).part)
    # Without a chat template they are prompt and completion.
    (first, _) = documents(encode(tmp_path / "alpaca.json").part)
    assert (bytes(first[0]), sum(first[1])) == (b"add\n\n1 2\n\n3\0", 2)


def test_tools_and_content_in_parts(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + CHATML.replace(
        "message.content", "(message.content or message.tool_calls[0].name)"
    )
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", template=template))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "dog"},
        {"role": "assistant", "content": "lazy"},
    ]
    path = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": [{"name": "look"}]}])
    (document,) = documents(encode(path, tokenizer=tokenizer).part)
    assert tokenizer.load().decode(document[0]).startswith("look;<|im_start|>user\nthe fox<|im_end|>")
    assert learned(tokenizer, document) == ["look<|im_end|>\n", "lazy<|im_end|>\n"]


CHAT = {"messages": TURNS}


@pytest.mark.parametrize(
    ("records", "template", "message"),
    [
        ([{"texts": "a"}], None, r"line 1: has the fields texts; a record needs one of messages, conversations"),
        ([{"text": "a"}, {"t": 1}], None, r"line 2: has no 'text', and the first record \(line 1\) has text; all rec"),
        ([CHAT, {"text": "a"}], CHATML, r"line 2: has no 'messages', and the first record \(line 1\) has messages"),
        ([{"text": 7}], None, r"line 1: text is a number, must be a string"),
        ([{"text": "a\ud800b"}], None, r"line 1: text has half of a surrogate pair at character 2, which is no text"),
        ([{"prompt": "a", "completion": None}], None, r"line 1: completion is null, must be a string"),
        ([{"messages": "a"}], CHATML, r"line 1: messages is a string, must be a list of messages"),
        ([{"messages": []}], CHATML, r"line 1: messages is an empty list; leave the record out"),
        ([{"messages": ["a"]}], CHATML, r"line 1: message 1 is no object; write \{\"role\""),
        ([{"messages": [{"role": "user"}]}], CHATML, r"line 1: message 1 has no 'content'; write"),
        ([{"messages": [{"role": "robot", "content": "a"}]}], CHATML, r"line 1: message 1: unknown role 'robot'; "),
        ([{"messages": [{"role": "user", "content": 1}]}], CHATML, r"message 1: content is a number, must be a string"),
        ([CHAT, {"messages": TURNS[:2]}], CHATML, r"line 2: has no assistant turn, so nothing to learn; leave "),
        ([{"messages": TURNS[2:]}], CHATML, r"line 1: begins with an assistant turn, for which the chat template has"),
        ([{"conversations": [{"from": "x", "value": ""}]}], CHATML, r"line 1: message 1: unknown role 'x'; known are"),
        ([{"conversations": [{"from": "gpt"}]}], CHATML, r"line 1: message 1 has no 'from' and 'value'"),
        ([CHAT], None, r"line 1: messages need a chat template, and the tokenizer in .* has none; put a chat_template"),
        ([CHAT], UNSTABLE, r"line 1: the chat template changes earlier turns when message 3 is added, so the"),
        ([CHAT], "{{ raise_exception('no system here') }}", r"line 1: the chat template refuses the conversation"),
        ([{"prompt": "a", "completion": ""}], "no eos", r"line 1: no token of it counts in the loss, so nothing to"),
        ([{"prompt": "a" * 600, "completion": ""}], None, r"line 1: has 6\d\d tokens, --seq-len 512 allows 512; raise"),
    ],
)  # fmt: skip
def test_wrong_records_are_told_by_file_and_line(
    tmp_path: Path, records: list[dict[str, Any]], template: str | None, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", records)
    eos = template != "no eos"
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model", eos=eos, template=template if eos else None))
    with pytest.raises(DataError, match=rf"^--data {path}: .*{message}") as caught:
        encode(path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cache/*"))


def test_conversations_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: messages need a tokenizer with a chat template, and text is read as"):
        encode(write(tmp_path / "a.jsonl", [CHAT]))


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path / "model"))
    path = write(tmp_path / "a.jsonl", [{"text": "<eos>"}, {"text": "<eos>the"}])
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: token 1 is \d+, allowed are 0 to 4 .*vocab_size is 5\)"):
        encode_files(
            [path], tokenizer=tokenizer, vocab_size=5, cache_directory=tmp_path / "c", longest=9, truncate=False
        )


def test_text_and_examples_do_not_mix(tmp_path: Path) -> None:
    text = write(tmp_path / "a.jsonl", [{"text": "a"}])
    pairs = write(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    alpaca = write(tmp_path / "c.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match=r"b\.jsonl: line 1: holds prompt/completion records, the files before it"):
        encode(text, pairs)
    assert len(documents(encode(pairs, alpaca).part)) == 2


def test_truncation_cuts_what_is_too_long(tmp_path: Path) -> None:
    long = {"prompt": "ab", "completion": "cdefgh"}
    others = [{"prompt": "a", "completion": "b"}, {"prompt": "abcdef", "completion": "g"}]
    path = write(tmp_path / "a.jsonl", [long, *others])
    found = encode(path, longest=5, truncate=True)
    assert [bytes(ids) for ids, _ in documents(found.part)] == [b"abcde", b"ab\0"]
    assert (found.num_truncated, found.num_dropped) == (2, 1)
    wider = encode(path, longest=9, truncate=True)
    assert [len(ids) for ids, _ in documents(wider.part)] == [9, 3, 8]


def test_memory_does_not_grow_with_the_number_of_records(tmp_path: Path) -> None:
    """5 MB in 12,000 records; at once there are two blocks of the file, and beginnings of 8192 documents."""
    write(tmp_path / "a.jsonl", [{"prompt": "p" * 350, "completion": f"{n} " * 5} for n in range(12_000)])
    tracemalloc.start()
    try:
        found = encode(tmp_path / "a.jsonl")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.part.num_documents == 12_000
    assert peak < 3 * 2**20


class Counting(ByteTokenizer):
    """Bytes; counts what it was given."""

    calls = 0

    def encode(self, text: str) -> np.typing.NDArray[np.int64]:
        self.calls += 1
        return super().encode(text)


def test_the_cache_is_taken_until_something_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "abc", "completion": "d"}])
    tokenizer = Counting()
    first = encode(path, tokenizer=tokenizer)
    assert len(first.created) == 4
    again = encode(path, tokenizer=tokenizer)
    assert (again.part, again.created, tokenizer.calls) == (first.part, (), 4)
    # Shorter rows: the cache knows which record is too long for them.
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: has 5 tokens, --seq-len 4 allows 4"):
        encode(path, tokenizer=tokenizer, longest=4)
    assert tokenizer.calls == 4
    write(path, [{"prompt": "a", "completion": "c"}])
    os.utime(path, ns=(1, 1))
    assert documents(encode(path, tokenizer=tokenizer).part) == [([97, 99, 0], [False, True, True])]
    tokenizer.fingerprint = "another"
    encode(path, tokenizer=tokenizer)
    assert tokenizer.calls == 8
    assert first.part.counted is not None
    for damaged in encode(path, tokenizer=tokenizer).part, first.part:
        assert damaged.counted is not None
        damaged.counted.path.unlink()
    assert encode(path, tokenizer=tokenizer).part.counted is not None
    assert tokenizer.calls == 10
    assert not list(tmp_path.rglob("*.tmp"))
