"""Tokenizers behind one small interface: SentencePiece models and Hugging Face `tokenizer.json` files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megalite.config.errors import InputError

try:
    import tokenizers
except ImportError:  # optional: pip install megalite[hf]
    tokenizers = None  # type: ignore[assignment]

# Names under which published tokenizers keep their end-of-document token, the plainest first.
EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens that appear in text are encoded as plain text, never as themselves."""

    name: str
    vocab_size: int  # one more than the largest id
    eod: int | None  # end-of-document id

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece `.model`; documents end with its eos piece unless `eod` names another."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise InputError(f"{path}: not a SentencePiece model: {error}") from error
        self.name = path.name
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id() if self._model.eos_id() >= 0 else None
        if eod is not None:
            self.eod = self._model.piece_to_id(eod)
            if self._model.id_to_piece(self.eod) != eod:
                raise _unknown_token(path, eod)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])


class HuggingFaceTokenizer:
    """A `tokenizer.json`; documents end with the first of EOD_NAMES it knows unless `eod` names another."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        if tokenizers is None:
            raise InputError(f"{path}: reading it needs the package `tokenizers`: pip install megalite[hf]")
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"{path}: not a Hugging Face tokenizer: {error}") from error
        self._model.no_truncation()  # a file may carry settings that would cut or pad documents
        self._model.no_padding()
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self.name = path.name
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = next((vocabulary[name] for name in EOD_NAMES if name in vocabulary), None)
        if eod is not None:
            if eod not in vocabulary:
                raise _unknown_token(path, eod)
            self.eod = vocabulary[eod]

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoded.ids for encoded in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids], skip_special_tokens=False)


def load_tokenizer(path: str | Path, eod: str | None = None) -> Tokenizer:
    """The tokenizer in a `.model` (SentencePiece) or `.json` (Hugging Face) file.

    `eod` names the end-of-document token where the usual choice is wrong. Raises InputError.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such tokenizer file")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, eod)
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path, eod)
    raise InputError(f"{path}: unknown kind of tokenizer; expected a SentencePiece .model or a tokenizer.json")


def tokenizer_hash(path: str | Path) -> str:
    """SHA-256 of a tokenizer's file, in hexadecimal: the same wherever the file lies. Raises InputError."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such tokenizer file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot read the tokenizer: {error.strerror}") from error


def _unknown_token(path: Path, token: str) -> InputError:
    return InputError(f"{path}: no token {token!r} to end documents with")
