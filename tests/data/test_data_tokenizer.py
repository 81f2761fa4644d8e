import errno
import hashlib
import io
import json
import os
import re
from pathlib import Path

import pytest
import sentencepiece
from tokenizer_cases import byte_level

from megalite.base.errors import InputError
from megalite.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["The cat sat.", "  two spaces\n\tand a tab", "naïve ☃", "<|endoftext|> and </s> are text here"]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose file asks for truncation and padding, as published ones may."""
    model = byte_level(TEXTS, 300, ["<s>", "</s>", "<|endoftext|>"])
    model.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(sentence_piece_model(eos_id=2))
    return path


def sentence_piece_model(eos_id: int, **options: object) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        eos_id=eos_id,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(params=["hugging_face", "sentence_piece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(request.getfixturevalue(request.param))


def test_text_survives(tokenizer: Tokenizer) -> None:
    encoded = [tokenizer.encode(text) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert tokenizer.encode_batch(TEXTS) == encoded
    assert all(0 <= token < tokenizer.vocab_size for ids in encoded for token in ids)


def test_special_tokens_in_text_stay_text(tokenizer: Tokenizer) -> None:
    assert not {0, 1, 2} & set(tokenizer.encode("a<|endoftext|>b</s>c<s>"))


def test_end_of_document(hugging_face: Path, sentence_piece: Path) -> None:
    assert load_tokenizer(hugging_face, eod="<|endoftext|>").eod == 2
    assert load_tokenizer(hugging_face, eod="</s>").eod == 1
    assert load_tokenizer(sentence_piece).eod == 2
    assert load_tokenizer(sentence_piece, eod="<s>").eod == 1
    assert load_tokenizer(sentence_piece).name == "tokenizer.model"


def rewritten(source: Path, folder: Path, *special: str, ordinary: tuple[str, ...] = ()) -> Path:
    """A copy of a tokenizer.json whose added tokens are these."""
    fields = json.loads(source.read_text())
    names = fields["added_tokens"]
    fields["added_tokens"] = [token for token in names if token["content"] in special + ordinary]
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in special
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(fields))
    return path


def test_an_ordinary_added_token_ends_no_document(hugging_face: Path, tmp_path: Path) -> None:
    path = rewritten(hugging_face, tmp_path, "<|endoftext|>", ordinary=("</s>",))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eod == 2
    assert 1 in tokenizer.encode("a </s> b")  # as the file says
    assert load_tokenizer(rewritten(hugging_face, tmp_path, "<s>", ordinary=("</s>", "<|endoftext|>"))).eod is None


def test_where_several_could_end_documents_one_must_be_named(hugging_face: Path, tmp_path: Path) -> None:
    path = rewritten(hugging_face, tmp_path, "</s>", "<|endoftext|>")
    tokenizer = load_tokenizer(path)  # is good for all that needs no end
    with pytest.raises(InputError, match=r"</s> and <\|endoftext\|> could each .*--eod-token"):
        _ = tokenizer.eod
    assert load_tokenizer(path, eod="</s>").eod == 1


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "special": True}])
def test_the_files_beside_name_the_end(hugging_face: Path, tmp_path: Path, name: str, token: object) -> None:
    path = rewritten(hugging_face, tmp_path, "<|endoftext|>", ordinary=("</s>",))
    (tmp_path / name).write_text(json.dumps({"eos_token": token}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eod == 1
    assert 1 not in tokenizer.encode("a </s> b</s>")  # once it is the end, text cannot forge it
    assert tokenizer.decode(tokenizer.encode("a </s> b</s>")) == "a </s> b</s>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token": "<|nope|>"}', "no token '<|nope|>'"),
        ("[1]", "holds list where a JSON object"),
        ("{" * 100_000, "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"eos_token": ' + "1" * 5000 + "}", "is not valid JSON"),
        (" " * ((16 << 20) + 1), "is larger than"),
    ],
    ids=["unknown", "list", "junk", "deep", "digits", "large"],
)
def test_a_bad_file_beside_hurts_only_who_needs_the_end(
    hugging_face: Path, tmp_path: Path, content: str, message: str
) -> None:
    path = rewritten(hugging_face, tmp_path, "<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(content)
    tokenizer = load_tokenizer(path)
    assert load_tokenizer(path, eod="<|endoftext|>").eod == 2
    with pytest.raises(InputError, match=re.escape(message)):
        _ = tokenizer.eod


def test_what_text_is_encoded_as_cannot_end_documents(hugging_face: Path, sentence_piece: Path, tmp_path: Path) -> None:
    for path, token in ((hugging_face, "a"), (sentence_piece, "<unk>"), (sentence_piece, "<0x0A>")):
        with pytest.raises(InputError, match=r"text can hold .* so it cannot end documents"):
            load_tokenizer(path, eod=token)
    path = tmp_path / "t.model"
    path.write_bytes(sentence_piece_model(eos_id=2, user_defined_symbols=["</s>"]))
    tokenizer = load_tokenizer(path)
    assert 2 in tokenizer.encode("a</s>")
    assert tokenizer.eod is None


def test_a_model_without_eos_has_no_end_of_document(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(sentence_piece_model(eos_id=-1))
    assert load_tokenizer(path).eod is None


def test_ids_beyond_the_count_of_tokens_are_in_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 9}, unk_token="a")).save(str(path))
    assert load_tokenizer(path).vocab_size == 10


@pytest.mark.parametrize("fixture", ["hugging_face", "sentence_piece"])
def test_an_unknown_end_of_document_is_an_error(fixture: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(InputError, match=r"no token '<\|nope\|>'"):
        load_tokenizer(request.getfixturevalue(fixture), eod="<|nope|>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.model", b"junk", "t.model: not a SentencePiece model"),
        ("t.model", b"", "t.model: not a SentencePiece model"),
        ("t.json", b"{}", "t.json: not a Hugging Face tokenizer"),
        ("t.bin", b"junk", "t.bin: unknown kind of tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path / name)


def test_a_damaged_model_is_told_whatever_its_package_raises(sentence_piece: Path, tmp_path: Path) -> None:
    content = sentence_piece.read_bytes()
    at = content.index(b"<0x00>")
    (tmp_path / "t.model").write_bytes(content[:at] + b"\xff" + content[at + 1 :])  # not UTF-8: a UnicodeDecodeError
    with pytest.raises(InputError, match=r"t\.model: not a SentencePiece model, or damaged: "):
        load_tokenizer(tmp_path / "t.model")


MUTE = {
    "word level": tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"),
    "unigram": tokenizers.models.Unigram([("a", -1.0)], unk_id=None),
}


@pytest.mark.parametrize("model", MUTE.values(), ids=MUTE.keys())
def test_text_that_cannot_be_encoded_is_told(tmp_path: Path, model: tokenizers.models.Model) -> None:
    path = tmp_path / "tokenizer.json"
    mute = tokenizers.Tokenizer(model)
    mute.add_special_tokens(["</s>"])  # that text cannot forge it is tried at once
    mute.save(str(path))
    tokenizer = load_tokenizer(path)
    for use in (lambda: tokenizer.encode("b"), lambda: tokenizer.encode_batch(["a", "b"]), lambda: tokenizer.eod):
        with pytest.raises(InputError, match=r"tokenizer\.json: the tokenizer cannot encode .*(UNK|unk_id)"):
            use()


def test_text_that_is_not_unicode_is_told(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="cannot encode some text"):
        tokenizer.encode("\udcff")
    with pytest.raises(InputError, match=r"no token '\\udcff'"):
        load_tokenizer(tokenizer.path, eod="\udcff")


@pytest.mark.parametrize("token", [-1, 10**6, 2**40])
def test_ids_outside_of_the_tokenizer_are_told(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(InputError, match=rf"token id {token} is outside the tokenizer's 300 tokens"):
        tokenizer.decode([1, token])


def test_ids_that_no_store_can_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 77}, unk_token="a")).save(str(path))
    small = path.read_text()  # saving walks over all ids, so the large ones are written here
    path.write_text(small.replace("77", str(2**31 - 1)))
    assert load_tokenizer(path).vocab_size == 2**31
    path.write_text(small.replace("77", str(2**31)))
    with pytest.raises(InputError, match="has the token id 2,147,483,648; ids must be below 2,147,483,648"):
        load_tokenizer(path)


def test_an_empty_name_is_no_end_of_document(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="no token ''"):
        load_tokenizer(tokenizer.path, eod="")


def test_a_name_that_is_not_utf8_is_read(sentence_piece: Path, tmp_path: Path) -> None:
    path = tmp_path / "t\udcff.model"
    path.write_bytes(sentence_piece.read_bytes())
    assert load_tokenizer(path).eod == 2


@pytest.mark.parametrize("name", ["t.model", "t.json"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / name).write_bytes(b"content")
    monkeypatch.setattr(Path, "open", refused)  # root may read everything
    with pytest.raises(InputError, match=rf"{name}: cannot read the tokenizer: Permission denied"):
        load_tokenizer(tmp_path / name)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such tokenizer file"):
        load_tokenizer(tmp_path / "t.model")


def test_the_hash_is_of_the_files_bytes(tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(b"some bytes")
    assert tokenizer_hash(tmp_path / "t.model") == hashlib.sha256(b"some bytes").hexdigest()
    with pytest.raises(InputError, match="no such tokenizer file"):
        tokenizer_hash(tmp_path)


def test_without_the_optional_package_the_error_says_how_to_get_it(
    hugging_face: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.data.tokenizer.tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'megalite\[hf\]'"):
        load_tokenizer(hugging_face)
