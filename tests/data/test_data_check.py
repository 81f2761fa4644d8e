"""What training refuses of its data before the first step."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_data_store import packed, put
from test_data_tokenizer import sentence_piece_model

from megalite.base.errors import InputError
from megalite.config.model_schema import Model
from megalite.config.schema import Data, Source
from megalite.data.check import Checked, Scans, check_data
from megalite.data.description import TokenizerFile
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import tokenizer_hash

VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(sentence_piece_model(eos_id=2))
    return str(path)


Check = Callable[..., Checked]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    def call(*paths: object, vocab_size: int = VOCABULARY, **data: object) -> Checked:
        sources = [Source(str(path)) for path in paths]
        scans = Scans(tmp_path / "run" / "data.json")
        checked = check_data(Data(train=sources, **data), Model(vocab_size=vocab_size), scans)  # type: ignore[arg-type]
        scans.keep()
        return checked

    return call


def write(prefix: Path, end: int | None = 2, made_with: TokenizerFile | None = None) -> Path:
    with StoreWriter(prefix, "uint16", end, made_with) as writer:
        for document in ([5, 6, 2], [2], [299, 2]):
            writer.add(document)
    return prefix


def bare(folder: Path, documents: list[list[int]]) -> Path:
    """A store as Megatron writes them."""
    folder.mkdir(exist_ok=True)
    return put(folder, *packed(documents))


def test_what_belongs_together_is_taken(tmp_path: Path, tokenizer: str, check: Check) -> None:
    made_with = TokenizerFile("t.model", tokenizer_hash(tokenizer))
    store = write(tmp_path / "own", made_with=made_with)
    assert check(store, tokenizer=tokenizer, mask_documents=True) == Checked(2, ())
    assert check(store) == Checked(2, ())
    assert not (tmp_path / "run").exists()


def test_every_problem_is_told_at_once(tmp_path: Path, tokenizer: str, check: Check) -> None:
    store = write(tmp_path / "own", made_with=TokenizerFile("other.json", "ab" * 32))
    with pytest.raises(InputError) as caught:
        check(store, store, vocab_size=200, tokenizer=tokenizer, end_of_document=3)
    told = str(caught.value)
    assert "7 problems" in told
    for text in (
        "data.tokenizer = ",
        "has 300 tokens, more than model.vocab_size = 200; use model.vocab_size=300 or more",
        "data.train[0].path = ",
        "own.bin holds token id 299, outside model.vocab_size = 200; use model.vocab_size=300 or more",
        "was made with another tokenizer, other.json, than data.tokenizer",
        "use the tokenizer whose SHA-256 begins with abababababab",
        "its documents end with token 2, not with data.end_of_document = 3",
        "data.train[1].path = ",
    ):
        assert text in told


@pytest.mark.parametrize("content", [b"junk", b"", bytes(100)])
def test_a_junk_tokenizer_is_refused(tmp_path: Path, check: Check, content: bytes) -> None:
    store = write(tmp_path / "own")
    for name in ("t.model", "t.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name}: not a"):
            check(store, tokenizer=str(tmp_path / name))


def test_a_description_of_another_store_is_refused(tmp_path: Path, check: Check) -> None:
    store, other = write(tmp_path / "own"), bare(tmp_path / "bare", [[5, 2]])
    for end in (".bin", ".idx"):
        shutil.copy(f"{other}{end}", f"{store}{end}")
    with pytest.raises(InputError, match=r"own\.json: describes another store, of 3 documents and 6 tokens"):
        check(store)


@pytest.mark.parametrize(("end", "offset"), [(".bin", 0), (".idx", 34)])
def test_a_description_of_changed_files_is_refused(tmp_path: Path, check: Check, end: str, offset: int) -> None:
    """The files are as large as they were: a token, or the length of a document, is another."""
    store = Path(f"{write(tmp_path / 'own')}{end}")
    content = bytearray(store.read_bytes())
    content[offset] ^= 1
    store.write_bytes(content)
    with pytest.raises(
        InputError, match=r"own\.json: does not fit \.bin and \.idx any more: .* --verify finds nothing"
    ):
        check(str(store.with_suffix("")))


def test_documents_that_end_otherwise_than_described_are_refused(tmp_path: Path, check: Check) -> None:
    store = write(tmp_path / "own")
    tokens = np.memmap(f"{store}.bin", "<u2", "r+")
    tokens[3] = 4
    tokens.flush()
    path = tmp_path / "own.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": TokenStore(store).fingerprint()}))
    with pytest.raises(InputError, match=r"end with token 2, but document 1 of the \.idx ends with 4"):
        check(store)


def test_a_bare_store_is_read_once(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    store, scans = bare(tmp_path / "bare", [[5, 6, 2], [299, 2]]), []
    verify = TokenStore.verify
    monkeypatch.setattr(TokenStore, "verify", lambda self, **given: scans.append(self.prefix) or verify(self, **given))
    with pytest.raises(InputError, match=r"store\.bin holds token id 299, outside model\.vocab_size = 299"):
        check(store, vocab_size=299)
    assert not (tmp_path / "run").exists()  # a refused run leaves no folder
    for _ in range(3):
        assert check(store, store, mask_documents=True, end_of_document=2) == Checked(2, ())
    assert len(scans) == 2
    os.utime(f"{store}.bin", (1, 1))
    check(store)
    assert len(scans) == 3
    for junk in (
        "",
        "[]",
        '{"stores": [1]}',
        json.dumps({"stores": {TokenStore(store).fingerprint(): {"largest_id": "x"}}}),
    ):
        (tmp_path / "run" / "data.json").write_text(junk)
        check(store)
    assert len(scans) == 7


def test_a_damaged_bare_store_is_refused(tmp_path: Path, check: Check) -> None:
    store = put(tmp_path, *packed([[1, 2], [3, -4]], "<i4"))
    with pytest.raises(InputError, match="token 3 is -4"):
        check(store)


def test_boundaries_and_ends_that_disagree_are_told(tmp_path: Path, check: Check) -> None:
    several = bare(tmp_path / "several", [[5, 2], [6, 3]])
    none = bare(tmp_path / "none", [[5, 7], [6, 7]])
    stream = bare(tmp_path / "stream", [[5, 7, 6, 7, 1]])
    found = check(several, none, stream, mask_documents=True, end_of_document=2)
    assert [text.partition(": ")[2] for text in found.warnings] == [
        f"documents end with several tokens, not with 2; where they begin is taken from {several}.idx",
        f"documents end with token 7, not with 2; where they begin is taken from {none}.idx",
        "does not end with the end-of-document token 2; is it the right one?",
    ]
    assert check(several, none, stream, end_of_document=2).warnings == ()


def test_where_nothing_tells_of_documents_they_cannot_be_masked(tmp_path: Path, tokenizer: str, check: Check) -> None:
    stream, marked = bare(tmp_path / "stream", [[5, 2, 6, 2]]), bare(tmp_path / "marked", [[5, 2], [6, 2]])
    with pytest.raises(InputError, match=r"data\.mask_documents = true: .*stream/store\.idx tells of no documents"):
        check(marked, stream, mask_documents=True)
    assert check(marked, mask_documents=True) == Checked(None, ())
    assert check(marked, stream, mask_documents=True, tokenizer=tokenizer) == Checked(2, ())
    assert check(write(tmp_path / "own"), stream, mask_documents=True) == Checked(2, ())


def test_a_long_scan_says_how_far_it_is(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megalite.data.store._CHUNK", 2)
    monkeypatch.setattr("megalite.data.check.NOTICE_INTERVAL", 0.0)
    check(bare(tmp_path / "bare", [[5, 6, 2], [2]]))
    assert "once for its largest token id" in (told := capsys.readouterr().err)
    assert ["50% done" in line for line in told.splitlines()] == [True, False]
