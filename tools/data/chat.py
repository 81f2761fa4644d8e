"""Conversations in JSON Lines become tokens, and a mask of those that the assistant writes.

A template comes from outside: worker processes render, each with a limit of memory, and each conversation with one of
time.
"""

import json
import re
import resource
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any

import numpy as np

from megalite.base.errors import InputError, listing
from megalite.data.store import token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.chat_template import ChatTemplate, Message, Source, TemplateError
from megalite_tools.data.documents import Document, Reject
from megalite_tools.data.encode import BATCH_CHARACTERS, BATCH_DOCUMENTS, Encoded, in_workers

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_DEPTH = 100  # lists and objects, one in the other
SECONDS = 20  # for one conversation
MEMORY = 4 << 30  # bytes that rendering may take in a worker, beside what it has

NO_ASSISTANT = "no trained token"


@dataclass(frozen=True)
class ChatEncoding:
    """The settings with which workers make tokens of conversations."""

    tokenizer: str  # path
    eod_token: str | None
    ends: bool  # whether the end-of-document id ends every conversation
    template: Source


def checked_chat(origin: str, record: dict[str, Any], messages: object) -> Document | Reject:
    """A conversation as a document, whose text is JSON of the messages and tools; or why it is none."""

    def reject(rule: str) -> Reject:
        return Reject(origin, "not a conversation", rule)

    if not isinstance(messages, list) or not messages:
        return reject("messages must be a list of one or more objects with `role` and `content`")
    if len(messages) > MAX_MESSAGES:
        return reject(f"{len(messages):,} messages; {MAX_MESSAGES:,} are allowed")
    for number, message in enumerate(messages, 1):
        if (wrong := _wrong_message(message)) is not None:
            return reject(f"message {number}: {wrong}")
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return reject("`tools` is a text that is no JSON; give a list of objects")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return reject("`tools` must be a list of objects")
    if _deep([messages, tools]):
        return reject(f"more than {MAX_DEPTH} lists and objects lie one in the other")
    text = json.dumps([origin, messages, tools], ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Reject(origin, "not valid Unicode", f"lone surrogate {text[error.start]!a}")
    return Document(text)


def _deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inside for item in items]
    return bool(level)


def _wrong_message(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"is {type(message).__name__}, not an object with `role` and `content`"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"its role is {json.dumps(role)[:50]}, which must be {listing([f'`{each}`' for each in ROLES])}"
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return None
    found = "missing" if content is None else type(content).__name__
    return f"its content is {found}, but must be text; only an assistant's message with `tool_calls` may have none"


def encode_chats(chats: Iterable[str], encoding: ChatEncoding, workers: int) -> Generator[Encoded]:
    """Tokens and masks of the conversations that `checked_chat` has made, in their order, from worker processes.

    Raises InputError for a tokenizer that cannot tell the places of tokens, and for what is no template.
    """
    load_tokenizer(encoding.tokenizer, encoding.eod_token).encode_marked("a")
    return in_workers(partial(encode_batch, encoding), _batches(chats), workers)


def encode_batch(encoding: ChatEncoding, batch: list[str]) -> Encoded:
    """Tokens and masks of a batch of conversations. A conversation that cannot be used becomes a Reject."""
    tokenizer, template = _opened(encoding)
    ids: list[int] = []
    bits: list[bool] = []
    lengths: list[int] = []
    rejects = []
    for chat in batch:
        origin, messages, tools = json.loads(chat)
        try:
            with _limited():
                found, trained = encode_chat(tokenizer, template, messages, tools)
        except TemplateError as error:
            rejects.append(Reject(origin, f"{encoding.template.path} cannot render it", str(error)))
            continue
        except InputError as error:
            rejects.append(Reject(origin, "cannot be tokenized", str(error)))
            continue
        if not any(trained):
            rejects.append(Reject(origin, NO_ASSISTANT, "the template marks none as the assistant's"))
            continue
        if encoding.ends and found[-1] != tokenizer.eod:
            assert tokenizer.eod is not None, "the caller has asked"
            found.append(tokenizer.eod)
            trained.append(False)
        ids += found
        bits += trained
        lengths.append(len(found))
    tokens = np.array(ids, token_dtype(tokenizer.vocab_size))
    return Encoded(tokens, lengths, [True] * len(lengths), np.array(bits, np.bool_), tuple(rejects))


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: list[Message], tools: list[Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Tokens of one conversation, and whether each is trained: where a character of it is the assistant's.

    Raises TemplateError, and InputError for messages with the text of a special token, which would be taken for one of
    the template's own.
    """
    _refuse_forged(tokenizer, messages, tools)
    text, spans = template.render(messages, tools)
    ids, offsets = tokenizer.encode_marked(text)
    trained, at = [], 0
    for start, end in offsets:  # both are in order
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        trained.append(at < len(spans) and end > spans[at][0])
    return ids, trained


def _refuse_forged(tokenizer: Tokenizer, messages: list[Message], tools: list[Any] | None) -> None:
    pattern = _special(tokenizer.specials)
    for number, message in enumerate([*messages, *(tools or [])], 1):
        for text in _texts(message):
            if pattern is not None and (found := pattern.search(text)):
                where = f"message {number}" if number <= len(messages) else f"tool {number - len(messages)}"
                raise InputError(f"{where} has the special token {found.group()!r} in its text; take it out")


@cache
def _special(names: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _texts(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield text
            case dict(fields):
                waiting += [*fields, *fields.values()]
            case list(items):
                waiting += items


@contextmanager
def _limited() -> Iterator[None]:
    def stop(_: int, __: FrameType | None) -> None:
        raise TemplateError(f"it takes longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def _opened(encoding: ChatEncoding) -> tuple[Tokenizer, ChatTemplate]:
    """The tokenizer and template of a worker, whose memory is limited from then on.

    Templates are compiled here alone, as that computes what is constant in them.
    """
    tokenizer = load_tokenizer(encoding.tokenizer, encoding.eod_token)
    with (
        suppress(ValueError, OSError),
        open("/proc/self/statm", "rb") as file,
    ):  # a lower limit is in force, or no Linux
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        with _limited():
            return tokenizer, ChatTemplate(encoding.template)
    except TemplateError as error:
        raise InputError(f"{encoding.template.path}: not a chat template: {error}") from error


def _batches(chats: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for chat in chats:
        batch.append(chat)
        characters += len(chat)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
