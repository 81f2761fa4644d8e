from pathlib import Path

import numpy as np
import pytest

from megalite.data.store import StoreWriter
from megalite.data.tokenizer import load_tokenizer
from megalite_tools.inspect_data import main


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
