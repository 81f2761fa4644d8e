"""Writing what a model says: one text as it comes, or many as JSON Lines."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megalite.config.errors import printable
from megalite.data.tokenizer import Tokenizer
from megalite.inference.generate import Drawn
from megalite.inference.prompts import Prompt


def stream(tokenizer: Tokenizer, drawn: Iterable[Drawn]) -> None:
    """Print one text token by token. A token may hold part of a character, so all tokens so far are decoded together.

    Characters that could disturb a terminal are escaped.
    """
    new: list[int] = []
    shown = text = ""
    for item in drawn:
        if item.finish == "stop":
            break
        new.append(item.token)
        text = tokenizer.decode(new)
        if text.startswith(shown) and not text.endswith("\ufffd"):
            _show(text[len(shown) :])
            shown = text
    if text.startswith(shown):  # with half a character, if the text ends there
        _show(text[len(shown) :])
    print()


def _show(text: str) -> None:
    print(printable(text, kept="\n\t") if sys.stdout.isatty() else text, end="", flush=True)


def write_lines(
    prompts: Sequence[Prompt], samples: int, tokenizer: Tokenizer, drawn: Iterable[Drawn], write: Callable[[str], Any]
) -> None:
    """Give `write` the line of every text, in the order of prompts, as soon as it and those before it have ended."""
    ready: dict[int, str] = {}
    following = 0
    for number, line in _ended(prompts, samples, tokenizer, drawn):
        ready[number] = line
        while following in ready:
            write(ready.pop(following))
            following += 1


def _ended(
    prompts: Sequence[Prompt], samples: int, tokenizer: Tokenizer, drawn: Iterable[Drawn]
) -> Iterator[tuple[int, str]]:
    """The number and the line of every text, in the order in which they end."""
    plain = not sys.stdout.isatty()
    new: dict[int, list[int]] = {}
    for item in drawn:
        request = item.request
        number = request.index * samples + request.sample
        tokens = new.setdefault(number, [])
        if item.finish != "stop":
            tokens.append(item.token)
        if item.finish is not None:
            line = {
                "index": request.index,
                "sample": request.sample,
                "prompt": prompts[request.index].text,
                "prompt_tokens": len(request.tokens),
                "text": tokenizer.decode(tokens),
                "tokens": tokens,
                "finish_reason": item.finish,
            }
            yield number, json.dumps(line, ensure_ascii=not plain) + "\n"
            del new[number]
