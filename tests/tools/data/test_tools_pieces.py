"""Long texts in pieces: the tokens must be those of the whole, whatever the tokenizer."""

import io
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.pieces import pieces

LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ["own", "dummy prefix", "merges spaces", "gpt2", "llama3", "metaspace"]
CODE = Path(io.__file__).read_text() + Path(__file__).read_text() * 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {"own": load_tokenizer(tokenizer_file)}
    for name, prefix, spaces in (("dummy prefix", True, True), ("merges spaces", False, False)):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CODE.splitlines()),
            model_writer=model,
            vocab_size=500,
            model_type="bpe",
            byte_fallback=True,
            add_dummy_prefix=prefix,
            remove_extra_whitespaces=False,
            split_by_whitespace=spaces,
            allow_whitespace_only_pieces=True,
            minloglevel=2,
        )
        (folder / f"{name}.model").write_bytes(model.getvalue())
        found[name] = load_tokenizer(folder / f"{name}.model")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, before in (
        ("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("llama3", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level])),
        ("metaspace", pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    ):
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = before
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator([CODE[at : at + 500] for at in range(0, len(CODE), 500)], trainer)
        model.save(str(folder / f"{name}.json"))
        found[name] = load_tokenizer(folder / f"{name}.json")
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite_tools.data.pieces.PIECE", 3000)
    monkeypatch.setattr("megalite_tools.data.pieces.WINDOW", 500)


def same(text: str, tokenizer: Tokenizer) -> list[str]:
    """The pieces of `text`, whose tokens are those of the whole."""
    found = list(pieces(text, tokenizer))
    assert [token for piece in found for token in tokenizer.encode(piece)] == tokenizer.encode(text)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_code_is_cut_and_comes_out_the_same(models: dict[str, Tokenizer], kind: str) -> None:
    assert len(same(CODE, models[kind])) >= len(CODE) // 3000 // 3


RUNS = st.tuples(
    st.sampled_from([" ", "\n", "\t", "a", "ab", "0", "é", "好", "<s>", "word ", "x\ny"]), st.integers(1, 999)
)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.one_of(RUNS.map(lambda run: run[0] * run[1]), st.text(max_size=200)), max_size=25))
@settings(max_examples=15, deadline=None)
def test_no_text_comes_out_otherwise(models: dict[str, Tokenizer], kind: str, parts: list[str]) -> None:
    text = "".join(parts)
    assert len(same(text, models[kind])) <= max(1, len(text))


def test_what_cannot_be_cut_stays_whole(models: dict[str, Tokenizer]) -> None:
    """A tokenizer that puts a space before every text lets it be cut at spaces only."""
    assert len(same("7" * 20_000, models["dummy prefix"])) == 1
    assert len(same("7" * 20_000 + " word" * 1000, models["dummy prefix"])) > 1
