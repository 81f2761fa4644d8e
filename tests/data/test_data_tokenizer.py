import hashlib
import io
from pathlib import Path

import pytest
import sentencepiece

from megalite.config.errors import InputError
from megalite.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["The cat sat.", "  two spaces\n\tand a tab", "naïve ☃", "<|endoftext|> and </s> are text here"]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose file asks for truncation and padding, as published ones may."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    model.enable_truncation(4)
    model.enable_padding(length=64)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(sentence_piece_model(eos_id=2))
    return path


def sentence_piece_model(eos_id: int) -> bytes:
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
    assert tokenizer.eod not in tokenizer.encode("a<|endoftext|>b</s>c")


def test_end_of_document(hugging_face: Path, sentence_piece: Path) -> None:
    assert load_tokenizer(hugging_face).eod == 2
    assert load_tokenizer(hugging_face, eod="</s>").eod == 1
    assert load_tokenizer(sentence_piece).eod == 2
    assert load_tokenizer(sentence_piece, eod="<s>").eod == 1
    assert load_tokenizer(sentence_piece).name == "tokenizer.model"


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
    with pytest.raises(InputError, match=r"pip install megalite\[hf\]"):
        load_tokenizer(hugging_face)
