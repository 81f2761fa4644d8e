"""Two kinds of tokenizers behind one small interface: SentencePiece models and Hugging Face `tokenizer.json` files."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import sentencepiece

from megalite.base.errors import InputError, listing
from megalite.base.files import exists, is_file, read_object
from megalite.data.marked_pieces import MarkedPieces
from megalite.data.store import MAX_VOCABULARY

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
COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # files of transformers that may name that token
TEMPLATE_FILE = "chat_template.jinja"  # file beside a tokenizer that may have its chat template
MAX_COMPANION_BYTES = 16 << 20  # bytes of such a file
BLANK = "\u2581"  # stands for a blank in the pieces of SentencePiece
MAX_BYTES = 1 << 30  # bytes of a tokenizer's file
ENCODING_PROBLEM = "the tokenizer cannot encode some text; use one that has a token for every character or byte"


class Tokenizer(ABC):
    """Text to token ids and back. Special tokens that appear in text are encoded as plain text, never as themselves.

    Raises InputError for text or ids that the tokenizer cannot take, whatever the package behind it raises.
    """

    vocab_size: int  # one more than the largest id
    _eod: int | InputError | None

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def eod(self) -> int | None:
        """The end-of-document id; no text is encoded as it. Raises InputError if it has to be named and is not."""
        if isinstance(self._eod, InputError):
            raise self._eod
        return self._eod

    @property
    def begin(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer's files ask to put before every text."""
        return ()

    def piece(self, token: int) -> str:
        """The name of a token."""
        with _told(f"{self.path}: no token {token}"):
            return self._piece(token)

    def encode(self, text: str) -> list[int]:
        with _told(f"{self.path}: {ENCODING_PROBLEM}"):
            return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _told(f"{self.path}: {ENCODING_PROBLEM}"):
            return self._encode_batch(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        plain = [int(token) for token in ids]
        for token in plain:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"{self.path}: token id {token} is outside the tokenizer's {self.vocab_size:,} tokens")
        with _told(f"{self.path}: the tokenizer cannot decode some tokens"):
            return self._decode(plain)

    @property
    def specials(self) -> tuple[str, ...]:
        """The names of special tokens that `encode_marked` takes for themselves."""
        return ()

    @property
    def written(self) -> tuple[str, ...]:
        """Further tokens that are whole wherever a text has their names. Some may be the marks of a chat template."""
        return ()

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text in which special tokens stand for themselves, and the characters that each is of."""
        with _told(f"{self.path}: {ENCODING_PROBLEM}"):
            return self._encode_marked(text)

    @abstractmethod
    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    @abstractmethod
    def is_special(self, token: int) -> bool:
        """Return whether the token marks something, such as where a document begins, in place of being text."""

    @abstractmethod
    def _piece(self, token: int) -> str: ...

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`. Documents end with its eos piece, unless `eod` names another."""

    def __init__(self, path: Path, content: bytes, eod: str | None = None) -> None:
        super().__init__(path)
        with _told(f"{path}: not a SentencePiece model, or damaged"):
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.load_from_serialized_proto(content)
            self.vocab_size = self._model.vocab_size()
        self._content = content
        end = self._model.eos_id() if eod is None else self._named(eod)
        # A model may declare its eos as a piece that text is encoded as.
        self._eod = end if end >= 0 and self._model.is_control(end) else None

    def _named(self, eod: str) -> int:
        with _told(f"{self.path}: no token {eod!a} to end documents with"):
            end: int = self._model.piece_to_id(eod)
            found = self._model.id_to_piece(end)
        if found != eod:
            raise _unknown_token(self.path, eod)
        if not self._model.is_control(end):
            raise _forgeable(self.path, eod)
        return end

    @property
    def begin(self) -> tuple[int, ...]:
        """The bos piece, where a tokenizer_config.json beside the model asks for it, as that of Llama 2 does."""
        file = self.path.with_name("tokenizer_config.json")
        beside = read_object(file, MAX_COMPANION_BYTES) if exists(file) else {}
        bos: int = self._model.bos_id()
        return (bos,) if beside.get("add_bos_token") is True and bos >= 0 else ()

    @cached_property
    def _marked(self) -> MarkedPieces:
        with _told(f"{self.path}: not a SentencePiece model that chat templates can be used with"):
            return MarkedPieces(self.path, self._content)

    @property
    def specials(self) -> tuple[str, ...]:
        return self._marked.special

    @property
    def written(self) -> tuple[str, ...]:
        return self._marked.written

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self._marked.encode(text)

    def is_special(self, token: int) -> bool:
        return bool(self._model.is_control(token))

    def _piece(self, token: int) -> str:
        found: str = self._model.id_to_piece(token)
        return found

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return self._model.encode(texts, num_threads=1)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. Documents end with the token that `eod` names, or else a file of COMPANION_FILES.

    Where none of them names one, it is the special token whose name is in EOD_NAMES. An added token that is not special
    is never chosen by itself, as the file says that text is encoded as it; if it is named, it becomes special here.
    """

    def __init__(self, path: Path, content: bytes, eod: str | None = None) -> None:
        super().__init__(path)
        if tokenizers is None:
            raise InputError(f"{path}: reading it needs the package `tokenizers`: pip install 'megalite[hf]'")
        with _told(f"{path}: not a Hugging Face tokenizer, or damaged"):
            self._model = tokenizers.Tokenizer.from_buffer(content)
            self._model.no_truncation()  # a file may carry settings that would cut or pad documents
            self._model.no_padding()
            self._model.encode_special_tokens = True
            vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"{path}: the tokenizer has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        try:
            named = eod if eod is not None else self._named_beside() or self._usual()
            self._eod = None if named is None else self._ending(named)
        except InputError as error:
            if eod is not None:
                raise
            self._eod = error  # most of what a tokenizer is for needs no end

    @property
    def begin(self) -> tuple[int, ...]:
        with _told(f"{self.path}: {ENCODING_PROBLEM}"):
            plain, special = (self._model.encode("a", add_special_tokens=added).ids for added in (False, True))
        extra = len(special) - len(plain)
        return tuple(special[:extra]) if special[extra:] == plain else ()

    def without_additions(self) -> bytes | None:
        """The file without the special tokens that it asks to put around every text; None: it asks for none."""
        if not self._model.num_special_tokens_to_add(is_pair=False):
            return None
        return json.dumps(json.loads(self._model.to_str()) | {"post_processor": None}, ensure_ascii=False).encode()

    def _named_beside(self) -> str | None:
        """The end-of-document token that a file of COMPANION_FILES names."""
        for file in map(self.path.with_name, COMPANION_FILES):
            token = read_object(file, MAX_COMPANION_BYTES).get("eos_token") if exists(file) else None
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
        return None

    def _usual(self) -> str | None:
        """The only special token with a usual name for the end of documents."""
        special = {token.content for token in self._model.get_added_tokens_decoder().values() if token.special}
        usual = sorted(special.intersection(EOD_NAMES))
        if len(usual) > 1:
            raise InputError(
                f"{self.path}: {listing(usual, 'and')} could each be the token that ends documents; "
                "name it: --eod-token when preparing data, data.end_of_document when training"
            )
        return usual[0] if usual else None

    def _ending(self, token: str) -> int:
        """The id of a token that is to end documents. From now on, no text is encoded as it."""
        with _told(f"{self.path}: no token {token!a} to end documents with"):
            end: int | None = self._model.token_to_id(token)
        if end is None:
            raise _unknown_token(self.path, token)
        added = self._model.get_added_tokens_decoder().get(end)
        if added is not None and not added.special:
            self._model.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        if end in self.encode(token) or end in self.encode(f"a {token} a{token}"):
            raise _forgeable(self.path, token)
        return end

    @property
    def specials(self) -> tuple[str, ...]:
        return tuple(token.content for token in self._model.get_added_tokens_decoder().values() if token.special)

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        self._model.encode_special_tokens = False
        try:
            encoded = self._model.encode(text, add_special_tokens=False)
        finally:
            self._model.encode_special_tokens = True
        return encoded.ids, encoded.offsets

    def is_special(self, token: int) -> bool:
        added = self._model.get_added_tokens_decoder().get(token)
        return added is not None and added.special

    def _piece(self, token: int) -> str:
        return self._model.id_to_token(token) or ""

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoded.ids for encoded in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)


def load_tokenizer(path: str | Path, eod: str | None = None) -> Tokenizer:
    """The tokenizer in a `.model` (SentencePiece) or `.json` (Hugging Face) file.

    `eod` names the end-of-document token where the usual choice is wrong. Raises InputError.
    """
    path = Path(path)
    content = _content(path)
    tokenizer: Tokenizer
    match path.suffix.lower():
        case ".model":
            tokenizer = SentencePieceTokenizer(path, content, eod)
        case ".json":
            tokenizer = HuggingFaceTokenizer(path, content, eod)
        case _:
            rule = "expected a SentencePiece .model or a tokenizer.json"
            raise InputError(f"{path}: unknown kind of tokenizer; {rule}")
    if tokenizer.vocab_size > MAX_VOCABULARY:
        rule = f"has the token id {tokenizer.vocab_size - 1:,}; ids must be below {MAX_VOCABULARY:,}"
        raise InputError(f"{path}: {rule}")
    return tokenizer


def tokenizer_hash(path: str | Path) -> str:
    """The SHA-256 of a tokenizer's file, in hexadecimal; it does not depend on the path. Raises InputError."""
    return hashlib.sha256(_content(Path(path))).hexdigest()


def _content(path: Path) -> bytes:
    """The bytes of a tokenizer's file. Raises InputError."""
    if not is_file(path):
        raise InputError(f"{path}: no such tokenizer file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= MAX_BYTES else b""  # memory is taken for all that is asked for
    except OSError as error:
        raise InputError(f"{path}: cannot read the tokenizer: {error.strerror}") from error
    if size > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES:,} bytes, more than a tokenizer ever has")
    return content


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn whatever a tokenizer's package raises into an InputError that begins with `what`."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        # The packages raise Exception itself, and a panic of Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{what}: {reason[:300]}") from error


def _unknown_token(path: Path, token: str) -> InputError:
    return InputError(f"{path}: no token {token!r} to end documents with")


def _forgeable(path: Path, token: str) -> InputError:
    return InputError(f"{path}: text can hold {token!r}, so it cannot end documents; name a special or control token")
