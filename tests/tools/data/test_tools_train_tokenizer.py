import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite_tools.data.train_tokenizer import main, train_model

CODE = """\
\tdef f(x):\r\n\n
        return {"naïve": "☃ 😀", 'n': 12345}   # trailing  \n\n\n    \t mixed\x00\x0b
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Some real code: the standard library's json package."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for source in Path(json.__file__).parent.glob("*.py"):
        shutil.copy(source, folder)
    return folder


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_code_survives_a_round_trip(tmp_path: Path, corpus: Path, kind: str) -> None:
    out = tmp_path / "code.model"
    arguments = [str(corpus), "--glob", "*.py", "--vocab-size", "600", "--type", kind, "--out", str(out)]
    assert main(arguments) == 0
    tokenizer = load_tokenizer(out)
    assert tokenizer.vocab_size == 600
    for text in [CODE, *(path.read_text() for path in corpus.iterdir())]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == 2
    assert [len(tokenizer.encode(text)) for text in ("\n", "\t")] == [1, 1]
    assert len(tokenizer.encode(" " * 16)) < 5  # runs of spaces are learnt
    assert main([*arguments[:-1], str(tmp_path / "again.model")]) == 0
    assert (tmp_path / "again.model").read_bytes() == out.read_bytes()


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_file)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "t.model").write_bytes(train_model(["2024 in words\n"] * 50, vocab_size=272, kind="bpe", lines=1000))
    assert len(load_tokenizer(tmp_path / "t.model").encode("2024")) == 4


def test_lines_too_long_for_sentencepiece_are_learnt_from() -> None:
    model = train_model(["zebra" * 5000], vocab_size=270, kind="bpe", lines=1000)
    assert b"zebra" in model


def test_sampling_is_bounded_and_repeatable() -> None:
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnop", k=12)) + "\n" for _ in range(2000)]
    models = [train_model(texts, vocab_size=400, kind="bpe", lines=101) for _ in range(2)]
    assert models[0] == models[1]
    with pytest.raises(InputError, match="too high"):  # for what 101 words can teach
        train_model(texts, vocab_size=3000, kind="bpe", lines=101)
    train_model(texts, vocab_size=3000, kind="bpe", lines=2000)


@pytest.mark.parametrize(("size", "message"), [(100, "smaller than required_chars"), (100_000, "Please set it to")])
def test_a_vocabulary_that_does_not_suit_the_text_is_an_error(size: int, message: str) -> None:
    with pytest.raises(InputError, match=f"--vocab-size {size}: Vocabulary size .*{message}"):
        train_model(["some words\n"], vocab_size=size, kind="bpe", lines=1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--out": "tokenizer.json"}, "must end in .model"),
        ({"--vocab-size": "-5"}, "--vocab-size -5 is not from 260 to 134,217,728"),
        ({"--vocab-size": "259"}, "--vocab-size 259 is not from 260"),
        ({"--vocab-size": str(2**63)}, f"--vocab-size {2**63} is not from 260"),
        ({"--lines": "100"}, "--lines 100 is not from 101 to 2,147,483,647"),
        ({"--lines": str(2**31)}, "--lines 2147483648 is not from 101"),
        ({"--glob": "*.rs"}, "no file in this directory matches --glob '*.rs'"),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"--out": "t.model", "--vocab-size": "300", "--glob": "*.py"} | changes
    assert main([str(corpus), *(word for pair in options.items() for word in pair)]) == 2
    assert message in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_an_existing_tokenizer_is_kept(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.model"
    out.write_bytes(b"precious")
    assert main([str(corpus), "--glob", "*.py", "--vocab-size", "300", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"


def test_that_nothing_can_be_written_is_told_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words\n")
    monkeypatch.setattr("megalite_tools.data.train_tokenizer.read_texts", None)  # is not called
    out = tmp_path / "a.txt" / "t.model"
    assert main([str(tmp_path / "a.txt"), "--vocab-size", "300", "--out", str(out)]) == 2
    assert "t.model: cannot be written: " in capsys.readouterr().err


def test_two_runs_with_the_same_name_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words\n")
    out = tmp_path / "t.model"
    arguments = [str(tmp_path / "a.txt"), "--vocab-size", "300", "--out", str(out)]
    codes = []

    def meanwhile(*_: object) -> bytes:
        codes.append(main(arguments))
        return b"a model"

    monkeypatch.setattr("megalite_tools.data.train_tokenizer.train_model", meanwhile)
    assert main(arguments) == 0
    assert codes == [2]
    assert "t.model: is being written by another process" in capsys.readouterr().err
    assert out.read_bytes() == b"a model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "t.model"]


def test_an_empty_corpus_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blank.txt").write_text("  \n")
    assert main([str(tmp_path / "blank.txt"), "--vocab-size", "300", "--out", str(tmp_path / "t.model")]) == 2
    assert "no usable document" in capsys.readouterr().err


def test_a_bad_document_is_told(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "zz.py").write_bytes(b"x = 1\ny = '\xff'\n")
    out = tmp_path / "t.model"
    arguments = [str(corpus), "--glob", "*.py", "--vocab-size", "600", "--out", str(out)]
    assert main(arguments) == 2
    assert f"megalite-train-tokenizer: error: {corpus}/zz.py:2: not valid UTF-8" in capsys.readouterr().err
    assert not out.exists()
    assert main([*arguments, "--on-error", "skip"]) == 0
    assert "skipped 1 × not valid UTF-8" in capsys.readouterr().out


def test_an_interruption_is_not_taken_for_an_error_of_the_text() -> None:
    def interrupted() -> Iterator[str]:
        yield "some words\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_model(interrupted(), vocab_size=300, kind="bpe", lines=1000)
