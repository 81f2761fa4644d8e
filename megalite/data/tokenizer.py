"""Tokenizers behind one small interface: SentencePiece models and Hugging Face `tokenizer.json` files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from megalite.config.errors import InputError, listing
from megalite.config.files import exists, is_file, read_object

try:
    import tokenizers
except ImportError:  # optional: pip install megalite[hf]
    tokenizers = None  # type: ignore[assignment]

# Names under which published tokenizers keep their end-of-document token.
EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")  # files of transformers that may name that token
MOST_BESIDE = 16 << 20  # bytes of such a file


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens that appear in text are encoded as plain text, never as themselves."""

    name: str
    vocab_size: int  # one more than the largest id

    @property
    def eod(self) -> int | None:
        """End-of-document id, which no text is encoded as. Raises InputError where it has to be named."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class SentencePieceTokenizer:
    """A SentencePiece `.model`; documents end with its eos piece unless `eod` names another."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise InputError(f"{path}: not a SentencePiece model: {error}") from error
        self.name = path.name
        self.vocab_size = self._model.vocab_size()
        end = self._model.eos_id() if eod is None else self._model.piece_to_id(eod)
        if eod is not None:
            if self._model.id_to_piece(end) != eod:
                raise _unknown_token(path, eod)
            if not self._model.is_control(end):
                raise _forgeable(path, eod)
        # A model may declare its eos as a piece that text is encoded as.
        self.eod = end if end >= 0 and self._model.is_control(end) else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])


class HuggingFaceTokenizer:
    """A `tokenizer.json`; documents end with the token that `eod` or the files of BESIDE name.

    Where none does, a special token of EOD_NAMES is it. Added tokens that are not special never are by themselves:
    the file says that text is encoded as them. Where one of them is named, it becomes special here.
    """

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
        if not vocabulary:
            raise InputError(f"{path}: a tokenizer without a single token")
        self.name = path.name
        self.vocab_size = max(vocabulary.values()) + 1
        self._path = path
        self._eod: int | InputError | None
        try:
            named = eod or self._named_beside() or self._usual()
            self._eod = self._ending(named) if named else None
        except InputError as error:
            if eod is not None:
                raise
            self._eod = error  # most of what a tokenizer is for needs no end

    @property
    def eod(self) -> int | None:
        if isinstance(self._eod, InputError):
            raise self._eod
        return self._eod

    def _named_beside(self) -> str | None:
        """The end that a file of BESIDE names."""
        for file in map(self._path.with_name, BESIDE):
            token = read_object(file, MOST_BESIDE).get("eos_token") if exists(file) else None
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
        return None

    def _usual(self) -> str | None:
        """The only special token whose name is usual for it."""
        special = {token.content for token in self._model.get_added_tokens_decoder().values() if token.special}
        usual = sorted(special.intersection(EOD_NAMES))
        if len(usual) > 1:
            raise InputError(
                f"{self._path}: {listing(usual, 'and')} could each be the token that ends documents; "
                "name it: --eod-token when preparing data, data.end_of_document when training"
            )
        return usual[0] if usual else None

    def _ending(self, token: str) -> int:
        """The id of a token that is to end documents, and that no text is encoded as from now on."""
        end: int | None = self._model.token_to_id(token)
        if end is None:
            raise _unknown_token(self._path, token)
        added = self._model.get_added_tokens_decoder().get(end)
        if added is not None and not added.special:
            self._model.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        if end in self.encode(token) or end in self.encode(f"a {token} a{token}"):
            raise _forgeable(self._path, token)
        return end

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
    if not is_file(path):
        raise InputError(f"{path}: no such tokenizer file")
    if path.suffix.lower() == ".model":
        return SentencePieceTokenizer(path, eod)
    if path.suffix.lower() == ".json":
        return HuggingFaceTokenizer(path, eod)
    raise InputError(f"{path}: unknown kind of tokenizer; expected a SentencePiece .model or a tokenizer.json")


def tokenizer_hash(path: str | Path) -> str:
    """SHA-256 of a tokenizer's file, in hexadecimal: the same wherever the file lies. Raises InputError."""
    path = Path(path)
    if not is_file(path):
        raise InputError(f"{path}: no such tokenizer file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot read the tokenizer: {error.strerror}") from error


def _unknown_token(path: Path, token: str) -> InputError:
    return InputError(f"{path}: no token {token!r} to end documents with")


def _forgeable(path: Path, token: str) -> InputError:
    return InputError(f"{path}: text can hold {token!r}, so it cannot end documents; name a special or control token")
