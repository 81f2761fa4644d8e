import io
import json
from pathlib import Path

import numpy as np
import pytest

from megalite.data.description import Description, TokenizerFile
from megalite.data.shards import Shard, write_shards
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import load_tokenizer, tokenizer_hash
from megalite_tools.data import inspect_data
from megalite_tools.data.inspect_data import main


@pytest.fixture
def prefix(tmp_path: Path, tokenizer_file: Path) -> str:
    tokenizer = load_tokenizer(tokenizer_file)
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        for text in ("first [bold]one[/bold]\n", "second\x1b[31m one", "third one " * 100):
            writer.add(tokenizer.encode(text))
    return str(tmp_path / "store")


def test_shows_what_a_store_holds(prefix: str, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--tokenizer", str(tokenizer_file), "--samples", "2", "--verify"]) == 0
    printed = capsys.readouterr().out
    lengths = sorted(np.memmap(prefix + ".idx", "<i4", "r", 34, (3,)).tolist())
    assert f"min {lengths[0]:,} · median {lengths[1]:,} · mean {sum(lengths) / 3:,.1f} · max {lengths[2]:,}" in printed
    assert f"{sum(lengths):,} of uint16" in printed
    assert "everything read; largest token id" in printed
    assert "'first [bold]one[/bold]\\n'" in printed
    assert "third one" in printed
    assert "second" not in printed


def test_text_cannot_disturb_the_terminal(
    prefix: str, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([prefix, "--tokenizer", str(tokenizer_file), "--samples", "9"]) == 0
    printed = capsys.readouterr().out
    assert "second\\x1b[31m one" in printed
    assert "\x1b[31m" not in printed


def test_special_tokens_are_shown_by_their_names(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SentencePiece itself leaves them out of a text."""
    tokenizer = load_tokenizer(tokenizer_file)
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add([tokenizer.eod, *tokenizer.encode("a"), tokenizer.eod, tokenizer.eod])
    assert main([str(tmp_path / "store"), "--tokenizer", str(tokenizer_file), "--samples", "1"]) == 0
    assert "tokens): '</s>a</s></s>'\n" in capsys.readouterr().out


def test_without_a_tokenizer_ids_are_shown(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--samples", "1"]) == 0
    ids = np.fromfile(prefix + ".bin", "<u2")[:3]
    assert "tokens): " + " ".join(map(str, ids)) in capsys.readouterr().out


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(tmp_path / "empty", "int32"):
        pass
    assert main([str(tmp_path / "empty"), "--samples", "3", "--verify"]) == 0
    assert "0 of int32" in capsys.readouterr().out


def test_a_truncated_store_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(prefix + ".bin")
    path.write_bytes(path.read_bytes()[:-2])
    assert main([prefix]) == 2
    assert "megalite-inspect-data: error: " in (error := capsys.readouterr().err)
    assert "store.bin: found" in error


def test_verify_finds_damage_in_the_middle(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.memmap(prefix + ".idx", "<i4", "r+", 34, (3,))
    lengths[1] += 1
    lengths.flush()
    Path(prefix + ".json").unlink()  # it would tell that the store has changed
    assert main([prefix]) == 0
    assert main([prefix, "--verify"]) == 2
    assert "offset" in capsys.readouterr().err


def test_verify_with_a_tokenizer_checks_ids(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreWriter(tmp_path / "other", "uint16") as writer:
        writer.add([1, 2, 60_000])
    arguments = [str(tmp_path / "other"), "--verify"]
    assert main(arguments) == 0
    assert main([*arguments, "--tokenizer", str(tokenizer_file)]) == 2
    assert "token 2 is 60000, outside a vocabulary of 320" in capsys.readouterr().err


def test_samples_of_another_tokenizer_are_told(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreWriter(tmp_path / "other", "uint16") as writer:
        writer.add([1, 2])
        writer.add([1, 2, 60_000])
    assert main([str(tmp_path / "other"), "--samples", "2", "--tokenizer", str(tokenizer_file)]) == 2
    error = capsys.readouterr().err
    assert "other.bin: document 1: " in error
    assert "token id 60000 is outside the tokenizer's 320 tokens" in error


def test_what_no_vocabulary_can_hold_is_not_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(tmp_path / "huge", "int64") as writer:
        writer.add([1, 2**62])
    (tmp_path / "huge.json").unlink()
    assert main([str(tmp_path / "huge"), "--describe"]) == 2
    assert "huge.bin: token 1 is 4611686018427387904, outside a vocabulary of 2147483648" in capsys.readouterr().err
    assert not (tmp_path / "huge.json").exists()


def test_a_description_cannot_disturb_the_terminal(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(prefix + ".json")
    evil = "\x1b]0;title\x07"
    fields = json.loads(path.read_text()) | {"megalite": evil, "tokenizer": {"file": evil, "sha256": "0" * 64}}
    path.write_text(json.dumps(fields | {"sources": [{"path": evil, "bytes": 1}], "source_files": 1}))
    assert main([prefix]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\\x1b]0;title\\x07") == 3
    assert not {"\x1b", "\x07"} & set(printed)


def test_the_description_is_shown(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix]) == 0
    assert "written by" in (printed := capsys.readouterr().out)
    assert "documents end with" in printed
    Path(prefix + ".json").unlink()
    assert main([prefix]) == 0
    assert "--describe writes store.json" in capsys.readouterr().out


def test_a_bare_store_can_be_described(prefix: str, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(Path(prefix).with_name("ended"), "uint16") as writer:
        writer.add([5, 2])
        writer.add([6, 2])
    path = Path(prefix).with_name("ended.json")
    arguments = [str(path.with_suffix("")), "--describe", "--tokenizer", str(tokenizer_file)]
    path.write_text('{"text": "a line of a corpus"}')
    assert main(arguments) == 2  # it is not ours to write over
    assert path.read_text() == '{"text": "a line of a corpus"}'
    path.unlink()
    assert main(arguments) == 0
    found = Description.read(path.with_suffix(""))
    assert found is not None
    assert (found.largest_id, found.end_of_document, found.documents) == (6, 2, 2)
    assert found.tokenizer == TokenizerFile("tokenizer.model", tokenizer_hash(tokenizer_file))
    assert "tokenizer.model" in capsys.readouterr().out


@pytest.mark.parametrize("samples", ["-1", "-9999999999999999999"])
def test_a_number_of_samples_below_0_is_refused(prefix: str, samples: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--samples", samples]) == 2
    assert f"--samples {samples}: must be at least 0" in capsys.readouterr().err


def test_more_samples_than_documents_show_all(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([prefix, "--samples", "99999999999999999999"]) == 0
    assert capsys.readouterr().out.count("tokens): ") == 3


def test_a_store_damaged_inside_is_told_when_samples_are_shown(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(prefix + ".json").unlink()
    index = Path(prefix + ".idx").read_bytes()
    Path(prefix + ".idx").write_bytes(index[:-16] + (2**40).to_bytes(8, "little") + index[-8:])
    assert main([prefix, "--samples", "3"]) == 2
    assert "expected boundaries that ascend" in capsys.readouterr().err


@pytest.fixture
def masked(tmp_path: Path) -> str:
    with StoreWriter(tmp_path / "masked", "uint16", masked=True) as writer:
        writer.add([5, 6, 7, 8], [False, True, True, False])
        writer.add([9, 10], [True, True])
        writer.add([11] * 70, [False] * 69 + [True])
        writer.add([12], [False])
    return str(tmp_path / "masked")


def test_trained_tokens_are_counted_and_marked(
    masked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_data, "MAX_MASKED_TOKENS", 64)
    assert main([masked, "--samples", "4", "--verify"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "masked.mask 10 bytes",
        "min 0 · median 2 · mean 1.2 · max 2 · none in 25.0%",
        "5, 6.5% of all",
        "document 0 (4 tokens): 5 «6 7» 8\n",
        "document 1 (2 tokens): «9 10»\n",
        "document 2 (70 tokens): " + "11 " * 64 + "…\n",
        "document 3 (1 token): 12\n",
    ):
        assert line in printed


def test_trained_tokens_are_green(masked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", shown := io.StringIO())
        assert main([masked, "--samples", "1"]) == 0
    assert "5 \x1b[32m«6 7»\x1b[0m 8" in shown.getvalue()


def test_marks_stand_in_text(tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    asked, answer = tokenizer.encode('it\'s "one"\n'), tokenizer.encode("two")
    with StoreWriter(tmp_path / "store", "uint16", masked=True) as writer:
        writer.add([*asked, *answer], [False] * len(asked) + [True] * len(answer))
    assert main([str(tmp_path / "store"), "--samples", "1", "--tokenizer", str(tokenizer_file)]) == 0
    assert "'it\\'s \"one\"\\n«two»'\n" in capsys.readouterr().out


def test_a_store_described_anew_keeps_its_mask(masked: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Description.read(masked)
    Path(masked + ".json").unlink()
    assert main([masked, "--describe"]) == 0
    after = Description.read(masked)
    assert before is not None
    assert after is not None
    assert (after.trained_tokens, after.fingerprint) == (5, before.fingerprint)


def test_hashes_of_every_block_are_written_beside_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add(np.arange(20_000))
    assert main([str(tmp_path / "store"), "--hashes"]) == 0
    blocks = 3 + 1  # of 40,000 bytes and of an index of one document
    assert (tmp_path / "store.hashes").stat().st_size == 16 * (1 + blocks)
    assert main(["s3://bucket/store", "--hashes"]) == 2
    assert "run them before the upload" in capsys.readouterr().err


def test_a_list_of_shards_is_shown_as_one_store(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = []
    for number, text in enumerate(("one", "another")):
        with StoreWriter(tmp_path / f"part{number}", "uint16", masked=True) as writer:
            tokens = load_tokenizer(tokenizer_file).encode(text)
            writer.add(tokens, [True] * len(tokens))
        (tmp_path / f"part{number}.json").unlink()
        shards.append(Shard(f"part{number}", 1, len(tokens)))
    write_shards(tmp_path / "list", shards)
    prefix = str(tmp_path / "list")
    assert main([prefix]) == 0
    assert "none; --describe writes those of the shards" in capsys.readouterr().out
    assert main([prefix, "--tokenizer", str(tokenizer_file), "--samples", "2", "--describe", "--hashes"]) == 0
    printed = capsys.readouterr().out
    count = sum(shard.tokens for shard in shards)
    facts = {" ".join(line.split()) for line in printed.splitlines()}
    assert {"shards 2", "documents 2", f"tokens {count} of uint16", f"trained tokens {count}, 100.0% of all"} <= facts
    assert ["«one»" in printed, "«another»" in printed] == [True, True]
    for number in (0, 1):
        described = Description.read(tmp_path / f"part{number}")
        assert described is not None
        assert described.tokenizer == TokenizerFile(tokenizer_file.name, tokenizer_hash(tokenizer_file))
        assert (tmp_path / f"part{number}.hashes").exists()
    bits = Path(f"{tmp_path}/part1.mask")
    bits.write_bytes(bytes([bits.read_bytes()[0] & ~1]))
    assert main([prefix]) == 2
    assert "part1.json: does not fit .bin, .idx and .mask" in capsys.readouterr().err
