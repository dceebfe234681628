"""What a record of a data file means: a text, a conversation, or a prompt with its completion. Checks, no tokenizing.

Reading files is in `jsonl.py` and `columnar.py`, ids are made in `examples.py` and `chat.py`. The formats are described
in docs/data.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hoist.tools.errors import DataError

#: Roles of messages; a chat template may know fewer.
ROLES = ("system", "developer", "user", "assistant", "tool")
#: What `from` says in ShareGPT files.
_SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


#: Every field that a record may have to do with.
FIELDS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "system", "tools",
)  # fmt: skip


class Kind(Enum):
    """What records of a file are; the value names the fields that tell."""

    MESSAGES = ("messages",)
    CONVERSATIONS = ("conversations",)
    PROMPT = ("prompt", "completion")
    INSTRUCTION = ("instruction", "output")
    TEXT = ("text",)

    @property
    def is_text(self) -> bool:
        """Plain text, which may be cut anywhere; else examples, which may not."""
        return self is Kind.TEXT


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A document, all of whose ids count."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A prompt, and what is learned to follow it."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages as chat templates take them; the assistant's turns count."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    """Descriptions of tools for the template."""
    fallback: Completion | None = None
    """The same without a chat template, where there is a way."""


Example = Text | Completion | Conversation


def find_kind(fields: Mapping[str, Any], where: str) -> Kind:
    """The kind of a file's first record, by its fields. Raises DataError for one of no kind."""
    for kind in Kind:
        if all(name in fields for name in kind.value):
            return kind
    known = ", ".join(f"{'/'.join(kind.value)}" for kind in Kind)
    raise DataError(
        f"{where}: has the fields {', '.join(sorted(map(str, fields))) or 'none'}; a record needs one of {known}"
    )


def parse(fields: Mapping[str, Any], kind: Kind, where: str, first: str) -> Example:
    """The example in a record. ``where`` names file and line, ``first`` the line of the record that set the kind.

    Raises DataError, one line, for missing fields, wrong types, unknown roles and conversations without an assistant.
    """
    for name in kind.value:
        if name not in fields:
            raise DataError(
                f"{where}: has no {name!r}, and the first record ({first}) has {'/'.join(kind.value)}; all "
                "records of a file must be alike"
            )
    if kind is Kind.TEXT:
        return Text(text=_string(fields, "text", where))
    if kind is Kind.PROMPT:
        return Completion(prompt=_string(fields, "prompt", where), completion=_string(fields, "completion", where))
    if kind is Kind.INSTRUCTION:
        return _instruction(fields, where)
    if kind is Kind.CONVERSATIONS:
        turns = _list(fields, "conversations", where)
        messages = [_sharegpt(turn, where, number) for number, turn in enumerate(turns, 1)]
    else:
        turns = _list(fields, "messages", where)
        messages = [_message(turn, where, number) for number, turn in enumerate(turns, 1)]
    if isinstance(fields.get("system"), str) and fields["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _checked(fields["system"], "system", where)})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: has no assistant turn, so nothing to learn; leave the record out")
    tools = fields.get("tools")
    return Conversation(messages=tuple(messages), tools=tuple(tools) if isinstance(tools, list) and tools else None)


def _instruction(fields: Mapping[str, Any], where: str) -> Conversation:
    """Alpaca's: the instruction, a blank line and the input, if any, are the user's turn; the output is learned."""
    prompt = _string(fields, "instruction", where)
    more = _string(fields, "input", where) if fields.get("input") is not None else ""
    if more:
        prompt = f"{prompt}\n\n{more}"
    output = _string(fields, "output", where)
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    system = _string(fields, "system", where) if fields.get("system") is not None else ""
    if system:
        messages.insert(0, {"role": "system", "content": system})
        prompt = f"{system}\n\n{prompt}"
    return Conversation(messages=tuple(messages), fallback=Completion(prompt=f"{prompt}\n\n", completion=output))


def _message(turn: Any, where: str, number: int) -> Mapping[str, Any]:
    """One of `messages`; fields besides role and content (names, tool calls) are the template's to understand."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: message {number} is no object; write {{\"role\": ..., \"content\": ...}}")
    for name in ("role", "content"):
        if name not in turn and not (name == "content" and turn.get("tool_calls")):
            raise DataError(f"{where}: message {number} has no {name!r}; write {{\"role\": ..., \"content\": ...}}")
    if turn["role"] not in ROLES:
        raise DataError(f"{where}: message {number}: unknown role {turn['role']!r}; known are {', '.join(ROLES)}")
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: message {number}: content is {_type(content)}, must be a string")
    others = {name: value for name, value in turn.items() if name not in ("role", "content") and value is not None}
    return {"role": turn["role"], "content": _checked(content, f"message {number}", where), **others}


def _sharegpt(turn: Any, where: str, number: int) -> Mapping[str, Any]:
    """One of ShareGPT's `conversations`: `from` and `value`; some files have role and content there."""
    if isinstance(turn, Mapping) and "role" in turn:
        return _message(turn, where, number)
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise DataError(f"{where}: message {number} has no 'from' and 'value'; write both, or role and content")
    role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise DataError(
            f"{where}: message {number}: unknown role {turn['from']!r}; known are {', '.join(_SHAREGPT_ROLES)}"
        )
    if not isinstance(turn["value"], str):
        raise DataError(f"{where}: message {number}: value is {_type(turn['value'])}, must be a string")
    return {"role": role, "content": _checked(turn["value"], f"message {number}", where)}


def _string(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {_type(value)}, must be a string")
    return _checked(value, name, where)


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = fields[name]
    if not isinstance(value, list):
        raise DataError(f"{where}: {name} is {_type(value)}, must be a list of messages")
    if not value:
        raise DataError(f"{where}: {name} is an empty list; leave the record out")
    return value


def _checked(text: str, name: str, where: str) -> str:
    """The same text, if it is Unicode: JSON can write half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {name} has half of a surrogate pair at character {error.start + 1}, which is no text; remove it"
        ) from None
    return text


def _type(value: Any) -> str:
    names = {
        type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string", bytes: "bytes",
    }  # fmt: skip
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
