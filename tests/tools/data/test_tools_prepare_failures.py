"""What preparing data leaves when it fails, is stopped or is killed: nothing, or what the next run takes over."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_tools_prepare_data import names

from megalite.base.stop_signals import STOP_SIGNALS
from megalite.data.store import TokenStore
from megalite.data.store_writer import StoreWriter
from megalite_tools import commands
from megalite_tools.data import encode, preparation
from megalite_tools.data.prepare_data import main


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_document_stops_and_leaves_nothing(
    out: Path, tokenizer_file: Path, corpus: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    with corpus.open("a") as file:
        file.write("{\n")
    arguments = ["--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", workers]
    assert main([str(corpus), *arguments, "--valid-fraction", "0.1"]) == 2
    error = capsys.readouterr().err
    assert f"megalite-prepare-data: error: {corpus}:301: not valid JSON" in error
    assert "--on-error skip" in error
    assert names(out) == []


def test_an_existing_store_is_kept(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "p_valid.idx").write_bytes(b"precious")
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    assert "p_valid.idx: exists already" in capsys.readouterr().err
    assert names(out) == ["p_valid.idx"]


def test_a_disk_that_fills_up_leaves_nothing(
    out: Path, corpus: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
        assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "p_train: cannot write the store: File too large" in capsys.readouterr().err
    assert names(out) == []


def test_either_both_splits_appear_or_neither(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = iter(range(10))
    real = os.fsync

    def full_at_the_last_file(descriptor: int) -> None:
        if next(synced) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr("megalite.data.store_writer.os.fsync", full_at_the_last_file)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 2
    assert names(out) == []


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_leaves_nothing(
    out: Path,
    corpus: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    seen: list[list[str]] = []

    def interrupted(*arguments: object) -> Iterator[str]:
        yield from ["some text"] * 100
        seen.append(names(out))
        os.kill(os.getpid(), number)
        yield "more"

    monkeypatch.setattr(preparation, "read_texts", interrupted)
    monkeypatch.setattr("megalite_tools.data.encode.BATCH_DOCUMENTS", 10)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["megalite-prepare-data", *arguments])
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert commands.prepare_data() == (130 if number == signal.SIGINT else 3)
    assert capsys.readouterr().err.splitlines()[-1] == f"megalite-prepare-data: stopped by {number.name}"
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert len(seen) == 1
    assert [name.startswith(".p.partial") for name in seen[0]] == [True]
    assert names(out) == []


def dies(*arguments: object) -> None:
    os._exit(1)


def test_a_worker_that_dies_is_a_clear_error(
    out: Path,
    corpus: Path,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megalite_tools.data.encode.encode_batch", dies)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "2"]
    assert main(arguments) == 2
    assert "a worker process died" in capsys.readouterr().err
    assert names(out) == []


def test_a_second_run_with_the_same_name_is_refused_at_once(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    with StoreWriter(out / "p", "uint16") as other:
        other.add([1, 2])
        assert main(arguments) == 2
        assert "p: is being written by another process" in capsys.readouterr().err
    assert TokenStore(out / "p").tokens == 2


def test_an_interruption_that_comes_too_late_changes_nothing(
    out: Path, corpus: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two stores that appear together."""
    publish = StoreWriter._publish

    def interrupted(writer: StoreWriter) -> None:
        publish(writer)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StoreWriter, "_publish", interrupted)
    before = signal.getsignal(signal.SIGINT)
    arguments = [str(corpus), "--tokenizer", str(tokenizer_file), "--out", str(out / "p"), "--workers", "1"]
    assert main([*arguments, "--valid-fraction", "0.1"]) == 0
    assert [name for name in names(out) if name.endswith(".idx")] == ["p_train.idx", "p_valid.idx"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_killed_run_leaves_no_worker_and_the_next_one_no_file(
    out: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    os.mkfifo(tmp_path / "fifo")  # never written to: the run waits for more documents
    corpus.write_text("text of a document\n" * 5000)
    code = (
        "import sys; from megalite_tools.data import encode, prepare_data, preparation\n"
        "encode.BATCH_DOCUMENTS = 100\n"
        "texts = preparation.read_texts\n"
        "def waiting(*given):\n"
        "    yield from texts(*given)\n"
        "    open(sys.argv[1]).read()\n"
        "preparation.read_texts = waiting\n"
        "sys.exit(prepare_data.main(sys.argv[2:]))"
    )
    arguments = [str(corpus), "--lines", "--tokenizer", str(tokenizer_file), "--out", str(out / "p")]
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "fifo"),
        *arguments,
        "--workers",
        "2",
        "--valid-fraction",
        "0.1",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            wait_until(lambda: len(children(run.pid)) == 3)
            workers = children(run.pid)  # and the tracker of shared resources
        finally:
            run.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert len(names(out)) == 2
    assert main([*arguments, "--workers", "1"]) == 0
    assert names(out) == ["p.bin", "p.idx", "p.json"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_are_started_with_signals_held_up() -> None:
    """Until they ignore what the terminal sends to all, it would end them with a traceback of what they import."""
    held: list[set[int]] = []
    pool = SimpleNamespace(submit=lambda encode, batch: held.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    encode.submit(pool, encode.encode_batch, [])
    assert held[0] >= set(STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)
