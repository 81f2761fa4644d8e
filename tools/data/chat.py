"""Conversations become tokens, and a mask of those that the assistant writes, or of those of a completion.

A template comes from outside: worker processes render, each with a limit of memory, and each conversation with one of
time.
"""

import re
import resource
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from types import FrameType

import numpy as np

from megalite.base.errors import InputError
from megalite.data.store import token_dtype
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.chat_template import NO_TEMPLATE, PROBE, ChatTemplate, Source, TemplateError
from megalite_tools.data.conversations import Conversation, parts_text, read_chat
from megalite_tools.data.documents import Reject
from megalite_tools.data.encode import BATCH_CHARACTERS, BATCH_DOCUMENTS, Encoded, in_workers

SECONDS = 20  # for one conversation
MEMORY = 4 << 30  # bytes that rendering may take in a worker, beside what it has

NO_ASSISTANT = "no trained token"


@dataclass(frozen=True)
class ChatEncoding:
    """The settings with which workers make tokens of conversations."""

    tokenizer: str  # path
    eod_token: str | None
    ends: bool  # whether the end-of-document id ends every conversation
    template: Source | None  # None: there is none, and only texts can be encoded


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
    for chat in map(read_chat, batch):
        if template is None and chat.messages:
            raise InputError(f"{encoding.tokenizer}: {NO_TEMPLATE}")
        try:
            if template is None or isinstance(chat.begin, str):
                found, trained = encode_texts(tokenizer, str(chat.begin), str(chat.completion))
            else:
                with _limited():
                    found, trained = encode_chat(tokenizer, template, chat)
        except TemplateError as error:
            assert encoding.template is not None
            rejects.append(Reject(chat.origin, f"{encoding.template.path} cannot render it", str(error)))
            continue
        except InputError as error:
            rejects.append(Reject(chat.origin, "cannot be tokenized", str(error)))
            continue
        if encoding.ends and (not found or found[-1] != tokenizer.eod):
            assert tokenizer.eod is not None, "the caller has asked"
            found.append(tokenizer.eod)
            trained.append(isinstance(chat.begin, str))  # a template has the ends that are to be learned
        if not any(trained):
            rejects.append(Reject(chat.origin, NO_ASSISTANT, "no text of the assistant or of a completion"))
            continue
        ids += found
        bits += trained
        lengths.append(len(found))
    tokens = np.array(ids, token_dtype(tokenizer.vocab_size))
    return Encoded(tokens, lengths, [True] * len(lengths), np.array(bits, np.bool_), tuple(rejects))


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, chat: Conversation) -> tuple[list[int], list[bool]]:
    """Tokens of one conversation, and whether each is trained: where a character of it is the assistant's.

    With a completion, it is trained instead: what follows the tokens of the prompt with the prompt for an answer, as
    far as these are the same when the completion follows. Raises TemplateError, and InputError for messages with the
    text of a special token, which would be taken for one of the template's own.
    """
    _refuse_forged(_marks(tokenizer, template), chat)
    template.check_tools(chat.messages, chat.tools)
    if isinstance(chat.begin, list) and chat.completion is not None:
        prompt = template.text(chat.begin, chat.tools, chat.variables, ask=True)
        whole = template.text(chat.messages, chat.tools, chat.variables)
        return _after(tokenizer.encode_marked(prompt)[0], tokenizer.encode_marked(whole)[0])
    text, spans = template.render(chat.messages, chat.tools, chat.variables)
    ids, offsets = tokenizer.encode_marked(text)
    trained, at = [], 0
    for start, end in offsets:  # both are in order
        while at < len(spans) and start >= spans[at][1]:
            at += 1
        trained.append(at < len(spans) and end > spans[at][0])
    return ids, trained


def encode_prompt(tokenizer: Tokenizer, template: ChatTemplate, chat: Conversation) -> tuple[str, list[int]]:
    """Text and tokens of a conversation with the prompt for an answer. Raises as `encode_chat` does."""
    _refuse_forged(_marks(tokenizer, template), chat)
    template.check_tools(chat.messages, chat.tools)
    with _limited():
        text = template.text(chat.messages, chat.tools, chat.variables, ask=True)
    return text, tokenizer.encode_marked(text)[0]


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The token with which a template ends the assistant's turn; None: it ends with text, or the template fails."""
    turns = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        with _limited():
            behind = template.text(turns).rpartition(PROBE)[2].lstrip()
    except TemplateError:
        return None
    tokens, places = tokenizer.encode_marked(behind)
    names = {*tokenizer.specials, *tokenizer.written}
    return tokens[0] if tokens and behind[slice(*places[0])] in names else None


def encode_texts(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """Tokens of two texts as one, and whether each is of the second. Special tokens stand for themselves in both."""
    begin = tokenizer.begin
    alone, whole = (tokenizer.encode_marked(text)[0] for text in (prompt, prompt + completion))
    return _after([*begin, *alone], [*begin, *whole])


def _after(prompt: list[int], whole: list[int]) -> tuple[list[int], list[bool]]:
    """Mark what follows the tokens that both begin with."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    return whole, [place >= same for place in range(len(whole))]


def _refuse_forged(marks: re.Pattern[str], chat: Conversation) -> None:
    given = [(f"message {number}", message) for number, message in enumerate(chat.messages, 1)]
    given += [(f"tool {number}", tool) for number, tool in enumerate(chat.tools or [], 1)]
    for where, value in [*given, ("chat_template_kwargs", chat.variables)]:
        for text in _texts(value):
            if found := marks.search(text):
                raise InputError(f"{where} has the special token {found.group()!r} in its text; take it out")


@cache
def _marks(tokenizer: Tokenizer, template: ChatTemplate) -> re.Pattern[str]:
    """Finds the names of all tokens that may be marks of the template."""
    source = template.source
    marks = (name for name in tokenizer.written if re.fullmatch(r"[<\[].+[>\]]", name))
    names = [*tokenizer.specials, *(name for name in marks if name in source.text or name in source.text_for_tools)]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


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
                if items and all(isinstance(item, dict) and isinstance(item.get("text"), str) for item in items):
                    yield parts_text(items)  # which templates join


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
def _opened(encoding: ChatEncoding) -> tuple[Tokenizer, ChatTemplate | None]:
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
    return tokenizer, None if encoding.template is None else compiled(encoding.template)


def compiled(source: Source) -> ChatTemplate:
    """The template of a source. Raises InputError if it is none."""
    try:
        with _limited():
            return ChatTemplate(source)
    except TemplateError as error:
        raise InputError(f"{source.path}: not a chat template: {error}") from error


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
