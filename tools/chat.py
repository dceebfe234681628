"""Conversations to ids with a tokenizer's chat template, and which of the ids the assistant says.

Where the template marks generations itself, its marks are taken; else conversations are rendered turn by turn, which
works for templates that only ever add to what they have rendered, and the others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hoist.tools.errors import DataError
from hoist.tools.records import Conversation
from hoist.tools.text import ModelTokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Encodes conversations with one tokenizer, which is loaded when the first one comes."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def has_template(self) -> bool:
        """The tokenizer has a chat template, or several."""
        return bool(self._tokenizer.load().chat_template)

    def encode(self, example: Conversation, where: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Ids of a conversation, and for each whether it counts: it is a part of an assistant's turn.

        Raises DataError, with ``where`` in front, where the template refuses or its rendering tells no turns.
        """
        loaded = self._tokenizer.load()
        if not self.has_template:
            raise DataError(
                f"{where}: messages need a chat template, and {self._tokenizer.description} has none; put a "
                "chat_template.jinja beside it, or write prompt/completion records"
            )
        if not loaded.is_fast:
            raise DataError(
                f"{where}: {self._tokenizer.description} cannot say which characters its ids stand for; save it as a "
                "fast tokenizer (tokenizer.json)"
            )
        try:
            marked = _GENERATION.search(loaded.get_chat_template(tools=_tools(example))) is not None
        except ValueError as error:  # there are several, and none is the default
            raise _refused(where, error) from error
        if marked:
            try:
                encoded = loaded.apply_chat_template(
                    list(example.messages), tools=_tools(example), tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                )  # fmt: skip
            except Exception as error:  # a template raises what it likes
                raise _refused(where, error) from error
            mask = np.asarray(encoded["assistant_masks"], dtype=np.bool_)
            return np.asarray(encoded["input_ids"], dtype=np.int64), mask
        text, spans = self._render(loaded, example, where)
        encoded = loaded(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        begins = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        ends = np.asarray([end for _, end in encoded["offset_mapping"]], dtype=np.int64)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            mask |= (begins >= start) & (ends <= stop)
        return ids, mask

    def _render(self, loaded: Any, example: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and where in it each assistant's turn is, without the header that prompts it."""

        def render(count: int, *, prompting: bool = False) -> str:
            try:
                return str(
                    loaded.apply_chat_template(
                        list(example.messages[:count]), tools=_tools(example), tokenize=False,
                        add_generation_prompt=prompting,
                    )
                )  # fmt: skip
            except Exception as error:  # a template raises what it likes
                raise _refused(where, error) from error

        whole = render(len(example.messages))
        spans = []
        for number, message in enumerate(example.messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise DataError(
                    f"{where}: begins with an assistant turn, for which the chat template has no prompt; put a system "
                    "or user turn before it, or use a template with {% generation %}"
                )
            before = render(number, prompting=True)
            after = render(number + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{where}: the chat template changes earlier turns when message {number + 1} is added, so the "
                    "assistant's part cannot be told; use a template that marks it with {% generation %}"
                )
            spans.append((len(before), len(after)))
        return whole, spans


def _tools(example: Conversation) -> Sequence[Any] | None:
    return None if example.tools is None else list(example.tools)


def _refused(where: str, error: Exception) -> DataError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{where}: the chat template refuses the conversation ({reason}); correct it or leave it out")
