"""Conversations to texts, with the spans that are targets.

Messages go through the tokenizer's own chat template. What the assistant says is found by the template's
`{% generation %}` blocks, or, without them, as what a longer conversation adds to the prompt before it. Where neither
tells it from the rest the record is refused: no mask ever falls back to "all of it".
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.errors import ConfigError

ASSISTANT = "assistant"
# Around what a generation block writes. Unicode keeps these two out of texts.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

Span: TypeAlias = tuple[int, int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


class UnusableError(ValueError):
    """Why a record is no document, to follow its file and line in a message."""


@dataclass(frozen=True)
class Part:
    """A text, the spans of it (in characters) that are targets, and whether an end of document follows.

    `end` is None where none does, and else whether it is a target. `special`: special tokens spelled in the text are
    themselves, as a template means them, and not the plain text they are in a document.
    """

    text: str
    spans: tuple[Span, ...]
    end: bool | None
    special: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of it is target."""
        return self.spans == ((0, len(self.text)),)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template as Hugging Face tokenizers carry it, run in Jinja's sandbox."""

    source: str
    path: str  # for messages
    bos: str
    eos: str

    def parts(self, messages: Messages, everything: bool) -> list[Part]:
        """The conversation, in one part. Raises UnusableError where what the assistant says can't be told."""
        text, spans = unmark(self._render(messages))
        if everything:
            spans = ((0, len(text)),)
        elif not self._marks:
            turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
            spans = tuple(self._added(messages, number, text) for number in turns)
        ended = bool(self.eos) and text.rstrip().endswith(self.eos)
        return [Part(text, spans, end=None if ended else everything, special=True)]

    def _added(self, messages: Messages, number: int, text: str) -> Span:
        """What message `number` adds after the prompt for it."""
        before = self._render(messages[:number], add_generation_prompt=True)
        after = self._render(messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise UnusableError(
                f"the chat template {self.path} writes message {number + 1} in another way when the conversation goes "
                "on, so what the assistant says can't be told from the rest: mark it in the template, with "
                "{% generation %} and {% endgeneration %} around it, or set train_on=all"
            )
        return len(before), len(after)

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        values = {"messages": messages, "bos_token": self.bos, "eos_token": self.eos}
        try:
            return self._template.render(**values, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnusableError(f"the chat template {self.path} does not take it: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"tokenizer_path: {self.path} is no Jinja template: {error}") from error

    @cached_property
    def _marks(self) -> bool:
        written = _environment().parse(self.source).find_all(nodes.TemplateData)
        return any(OPEN in node.data for node in written)


def plain(messages: Messages, everything: bool) -> list[Part]:
    """The form for tokenizers without a chat template: `role: content` lines, and an end after each assistant turn."""
    parts, text = [], ""
    for message in messages:
        start = len(text) + len(message["role"]) + 2
        text += f"{message['role']}: {message['content']}"
        if message["role"] != ASSISTANT:
            text += "\n"
            continue
        parts.append(Part(text, ((0 if everything else start, len(text)),), end=True))
        text = ""
    if text:
        parts.append(Part(text, ((0, len(text)),) if everything else (), end=everything))
    return parts


def is_conversation(record: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """Whether the record's one column holds messages."""
    return len(columns) == 1 and isinstance(record.get(columns[0]), list)


def parts_of(
    record: Mapping[str, Any], columns: Sequence[str], chat: ChatTemplate | None, everything: bool
) -> list[Part]:
    """One document of a record's columns: a text, messages, or a prompt and its completion. Raises UnusableError."""
    missing = [column for column in columns if column not in record]
    if missing:
        names = ", ".join(list(record)[:5]) or "none"
        raise UnusableError(f'no field "{missing[0]}" (it has {names}); name the fields with train_data_columns')
    values = [record[column] for column in columns]
    if len(values) == 2:
        prompt, completion = (_text(value, column) for value, column in zip(values, columns, strict=True))
        start = 0 if everything else len(prompt)
        parts = [Part(prompt + completion, ((start, len(prompt) + len(completion)),), end=True)]
    elif is_conversation(record, columns):
        messages = _messages(values[0], columns[0], needs_text=chat is None)
        parts = plain(messages, everything) if chat is None else chat.parts(messages, everything)
    else:
        text = _text(values[0], columns[0])
        parts = [Part(text, ((0, len(text)),), end=True)]
    for part in parts:
        try:
            part.text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can spell it, UTF-8 can't
            raise UnusableError(f"its text is not valid Unicode ({error.reason})") from error
    return parts


def unmark(marked: str) -> tuple[str, tuple[Span, ...]]:
    """The text without marks, and the spans that stood between them."""
    text, spans, start = "", [], 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece == OPEN:
            start = len(text)
        elif piece == CLOSE:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, tuple(spans)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise UnusableError(f'"{column}" is a {type(value).__name__}, not a string')
    return value


def _messages(value: list[Any], column: str, needs_text: bool) -> Messages:
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnusableError(f'"{column}": message {number} is no {{"role": ..., "content": ...}}')
        if needs_text and not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise UnusableError(f'"{column}": the content of message {number} is a {kind}, not a string')
        spelled = json.dumps(message, ensure_ascii=False, default=str)
        if OPEN in spelled or CLOSE in spelled:
            raise UnusableError(f'"{column}": message {number} holds U+FDD0 or U+FDD1, which are no characters')
    return value


class _Generation(Extension):
    """`{% generation %}`: writes what is in it between OPEN and CLOSE."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (OPEN, CLOSE))
        return [opened, *body, closed]


def _environment() -> jinja2.Environment:
    """What published templates count on: their whitespace rules, loop controls, `tojson` and `raise_exception`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
