"""Prompts: reading them from files of unknown content, and what a model sees of them."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO

from megalite.base.errors import InputError, counted
from megalite.base.json_bounds import parse
from megalite.data.tokenizer import Tokenizer
from megalite.inference.generate import Request

MAX_PROMPT_BYTES = 1 << 24  # bytes of a prompt, at most
MAX_PROMPTS = 1 << 20  # prompts in a file, at most
CHARACTERS_PER_TOKEN = 64  # characters kept of a prompt's end, per token that the model sees: no token is longer
STDIN = "standard input"


@dataclass(frozen=True)
class Prompt:
    """A text, or tokens, to be continued."""

    where: str  # in messages
    text: str | None
    tokens: tuple[int, ...] = ()  # to be taken instead of the text's


def prompt_of(text: str) -> Prompt:
    """The prompt of a command line. Raises InputError if it is no UTF-8."""
    return Prompt("--prompt", _decoded(os.fsencode(text), "--prompt"))


def read_prompt(file: str) -> Prompt:
    """A whole file as one prompt, unchanged. Raises InputError if it is too large, or no UTF-8."""
    where = STDIN if file == "-" else f"--prompt-file {file}"
    with _opened(file, where, "--prompt") as stream:
        raw = _read(stream, where)
    if len(raw) > MAX_PROMPT_BYTES:
        raise InputError(f"{where}: is longer than {MAX_PROMPT_BYTES:,} bytes, more than any model reads; give its end")
    return Prompt(where, _decoded(raw, where))


def read_prompts(file: str) -> list[Prompt]:
    """The prompts of JSON Lines, or of a `.txt` the lines. Blank lines count for nothing. Raises InputError."""
    read = _plain if file.endswith(".txt") else _parsed
    return [read(line, place) for place, line in read_lines(file)]


def read_lines(file: str) -> list[tuple[str, bytes]]:
    """The lines of a file of prompts that are not blank, at least one, each with its place. Raises InputError."""
    where = STDIN if file == "-" else f"--prompts {file}"
    lines = file_lines(file, where, "--prompts")
    if not lines:
        raise InputError(f"{where}: has no prompt")
    return lines


def file_lines(file: str, where: str, instead: str) -> list[tuple[str, bytes]]:
    """Every line of a file that is not blank, with its place. Raises InputError.

    where: the file, in messages. instead: the option to be used where standard input is closed.
    """
    with _opened(file, where, instead) as stream:
        return list(_lines(stream, where))


def requests(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    end: int | None,
    length: int,
    count: int,
    samples: int,
    begin: Sequence[int] = (),
) -> tuple[list[Request], list[str]]:
    """Requests to a model whose sequences have `length` tokens, and warnings.

    The model sees the end of a prompt that is longer: as many tokens as leave room for `count` new ones, but at least
    half a sequence. A text ends where a sequence does. end: the token that a document begins after; an empty prompt
    begins one. begin: tokens put before every prompt that is a text. Raises InputError.
    """
    shown = max(1, length // 2, length + 1 - count)
    found: list[Request] = []
    cut = full = 0
    for index, prompt in enumerate(prompts):
        tokens = _tokens(prompt, tokenizer, end, length, begin)
        if len(tokens) > length:
            tokens, cut = tokens[-shown:], cut + 1
        most = min(count, length + 1 - len(tokens))
        full += most < count
        found += [Request(index, sample, tuple(tokens), most) for sample in range(samples)]
    warnings = []
    if cut:
        which = "the prompt" if len(prompts) == 1 else counted(cut, "prompt")
        warnings.append(f"of {which}, the model sees the last {shown:,} tokens only")
    if full:
        which = "the text ends" if len(prompts) == 1 else f"{counted(full, 'text ends', 'texts end')}"
        warnings.append(f"{which} before --tokens {count}, where the model's sequence of {length:,} tokens does")
    return found, warnings


def _tokens(prompt: Prompt, tokenizer: Tokenizer, end: int | None, length: int, begin: Sequence[int]) -> list[int]:
    if prompt.tokens or prompt.text is None:
        if (largest := max(prompt.tokens)) >= tokenizer.vocab_size:
            raise InputError(f"{prompt.where}: token {largest} is outside the tokenizer's {tokenizer.vocab_size:,}")
        return list(prompt.tokens)
    tokens = [*begin, *tokenizer.encode(prompt.text[-length * CHARACTERS_PER_TOKEN :])]
    if tokens:
        return tokens
    if end is None:
        raise InputError(
            f"{prompt.where}: is empty, and {tokenizer.path} has no end-of-document token to start from; give --prompt"
        )
    return [end]


def _opened(file: str, where: str, instead: str) -> "nullcontext[IO[bytes]] | IO[bytes]":
    if file == "-":
        if sys.stdin is None:
            raise InputError(f"{where}: is closed; give {instead}")
        return nullcontext(sys.stdin.buffer)
    try:
        return open(file, "rb")
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None


def _read(stream: IO[bytes], where: str) -> bytes:
    try:
        return stream.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None


def _lines(stream: IO[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """Every line that is not blank, with its place."""
    number = 0
    try:
        while line := stream.readline(MAX_PROMPT_BYTES + 1):
            number += 1
            place = f"{where}: line {number}"
            if len(line) > MAX_PROMPT_BYTES:
                raise InputError(f"{place}: is longer than {MAX_PROMPT_BYTES:,} bytes, more than any model reads")
            if number > MAX_PROMPTS:
                raise InputError(f"{where}: has more than {MAX_PROMPTS:,} lines; divide it")
            if line.strip():
                yield place, line
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None


def _plain(line: bytes, place: str) -> Prompt:
    return Prompt(place, _decoded(line, place).rstrip("\r\n"))


def _parsed(line: bytes, place: str) -> Prompt:
    rule = 'is not {"prompt": "…"} or {"tokens": [1, 2, …]}'
    try:
        found = parse(line)
    except ValueError:
        raise InputError(f"{place}: {rule}, but no JSON; name a file of lines of text .txt") from None
    if not isinstance(found, dict) or len(found.keys() & {"prompt", "tokens"}) != 1:
        raise InputError(f"{place}: {rule}")
    if "prompt" in found:
        text = found["prompt"]
        if not isinstance(text, str) or any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"{place}: {rule}: the prompt is no text")
        return Prompt(place, text)
    tokens = found["tokens"]
    if not isinstance(tokens, list) or not tokens or any(type(token) is not int or token < 0 for token in tokens):
        raise InputError(f"{place}: {rule}: tokens must be whole numbers of at least 0, at least one")
    return Prompt(place, None, tuple(tokens))


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is no UTF-8 at byte {error.start}; convert it, for example with iconv") from None
