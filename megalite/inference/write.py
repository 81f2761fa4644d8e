"""Writing what a model says: one text as it comes, or many as JSON Lines."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from megalite.base.errors import printable
from megalite.data.tokenizer import Tokenizer
from megalite.inference.generate import Drawn, Request
from megalite.inference.prompts import Prompt

NOTHING: Mapping[str, str] = MappingProxyType({})
TAIL = 64  # tokens of a prompt that are decoded with new ones: more than blanks or a character reach over


class Continuation:
    """The text that new tokens add to a prompt.

    It is the difference between the prompt decoded with and without them: many tokenizers drop the blank before the
    first token that they decode, others change blanks where two tokens meet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, tokens: Sequence[int]) -> None:
        """tokens: those of the prompt that the model saw, with any that stand before it."""
        self._tokenizer = tokenizer
        marks = [number for number, token in enumerate(tokens) if tokenizer.is_special(token)]
        self._read = list(tokens[marks[-1] + 1 if marks else 0 :])[-TAIL:]  # a document begins after such a token
        self._before = tokenizer.decode(self._read)
        text = prompt.text or ""
        self._blank_lost = text[-1:].isspace() and not self._before[-1:].isspace()

    def text(self, new: Sequence[int]) -> str:
        whole = self._tokenizer.decode([*self._read, *new])
        # A prompt may end within a character, which the new tokens complete.
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self._before, whole, strict=False))
        added = whole[sum(1 for _ in alike) :]
        # Some tokenizers drop blanks at the end of a prompt; the first word written then brings one of its own.
        return added.removeprefix(" ") if self._blank_lost else added


def stream(tokenizer: Tokenizer, prompt: Prompt, drawn: Iterable[Drawn]) -> None:
    """Print one text token by token. A token may hold part of a character, so all tokens so far are decoded together.

    Characters that could disturb a terminal are escaped.
    """
    new: list[int] = []
    shown = text = ""
    continuation: Continuation | None = None
    for item in drawn:
        if item.finish == "stop":
            break
        new.append(item.token)
        continuation = continuation or Continuation(tokenizer, prompt, item.request.tokens)
        text = continuation.text(new)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            show(text[len(shown) :])
            shown = text
    for _ in drawn:  # ranks that share out experts make passes until none has any
        pass
    if text.startswith(shown):  # with half a character, if the text ends there
        show(text[len(shown) :])
    print()


def show(text: str) -> None:
    """Print a part of a text; on a terminal, without what could disturb it."""
    print(printable(text, kept="\n\t") if sys.stdout.isatty() else text, end="", flush=True)


def write_lines(
    prompts: Sequence[Prompt],
    samples: int,
    tokenizer: Tokenizer,
    drawn: Iterable[Drawn],
    write: Callable[[str], Any],
    beside: Mapping[str, str] = NOTHING,
) -> None:
    """Give `write` the line of every text, in the order of prompts, as soon as it and those before it have ended.

    beside: what each line tells first.
    """
    ready: dict[int, str] = {}
    following = 0
    for number, line in _ended(prompts, samples, tokenizer, drawn, beside):
        ready[number] = line
        while following in ready:
            write(ready.pop(following))
            following += 1


def _ended(
    prompts: Sequence[Prompt], samples: int, tokenizer: Tokenizer, drawn: Iterable[Drawn], beside: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """The number and the line of every text, in the order in which they end."""
    plain = not sys.stdout.isatty()
    new: dict[int, list[int]] = {}

    def text(request: Request, tokens: Sequence[int]) -> str:
        return Continuation(tokenizer, prompts[request.index], request.tokens).text(tokens)

    for item in drawn:
        request = item.request
        number = request.index * samples + request.sample
        tokens = new.setdefault(number, [])
        if item.finish != "stop":
            tokens.append(item.token)
        if item.finish is not None:
            line = {
                **beside,
                "index": request.index,
                "sample": request.sample,
                "prompt": prompts[request.index].text,
                "prompt_tokens": len(request.tokens),
                "text": text(request, tokens),
                "tokens": tokens,
                "finish_reason": item.finish,
            }
            yield number, json.dumps(line, ensure_ascii=not plain) + "\n"
            del new[number]
