import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megalite.base.errors import InputError
from megalite.distributed.start.failure_report import OUTCOME, note_outcome, tell
from megalite.distributed.start.local import MEETING, launch, log_file
from megalite.distributed.start.ranks import RankInfo
from megalite.distributed.start.start import start

Program = Callable[[str], str]
JOB = """
import torch
import torch.distributed as dist
from megalite.base.errors import InputError
from megalite.distributed.start.ranks import find_rank_info
from megalite.distributed.start.start import run_rank, start

def main():
    start(find_rank_info(), "cpu", 100.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    return after_meeting()

def after_meeting():
{body}

sys.exit(run_rank(main, find_rank_info()))
"""


@pytest.fixture(autouse=True)
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file for the exit code of the first rank to fail."""
    monkeypatch.setenv(OUTCOME, str(tmp_path / "outcome"))
    return tmp_path / "outcome"


@pytest.fixture(autouse=True)
def keeps(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In place of what has a process keep memory to its end, which is not for that of all tests."""
    keeps = Mock()
    monkeypatch.setattr("megalite.distributed.start.start.keep_freed_memory", keeps)
    return keeps


def run(program: Program, folder: Path, *body: str) -> int:
    """Two ranks that meet, and then do what `body` says."""
    module = program(JOB.format(body="\n".join(f"    {line}" for line in body)))
    return launch(module, [str(folder)], 2, folder / "logs")


def test_a_failing_rank_is_shown_and_not_its_peers_that_lost_it(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(program, tmp_path, "if rank == 1: raise ValueError('boom')", "dist.barrier()") == 1
    shown = capfd.readouterr().err
    assert "megalite: rank 1: Traceback" in shown
    assert "ValueError: boom\n" in shown
    assert "lost a peer" not in shown
    assert "rank 0:" not in shown
    assert (tmp_path / "outcome").read_text() == "1\n"


def test_bad_input_is_one_message_without_a_traceback(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(program, tmp_path, "raise InputError('a.b = 1: must be 2')") == 2
    shown = capfd.readouterr().err
    assert shown.count("error: a.b = 1: must be 2") == 1
    assert "Traceback" not in shown


def test_a_rank_that_leaves_is_a_lost_peer(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(program, tmp_path, "if rank == 1: os._exit(0)", "dist.barrier()") == 5
    assert "megalite: rank 0: lost a peer: " in capfd.readouterr().err


def test_a_verdict_is_no_failure_and_waits_for_every_rank(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = "if rank == 0: time.sleep(2); print('last words')"
    assert run(program, tmp_path, slow, "return 4") == 4
    shown = capfd.readouterr()
    assert shown.out == "last words\n"
    assert (tmp_path / "outcome").read_text() == "4\n"
    assert "megalite" not in shown.err
    assert log_file(tmp_path / "logs", 1).exists()


def test_the_first_outcome_stays_and_a_folder_that_is_gone_does_not_matter(
    outcome: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (4, 5):
        note_outcome(code)
    assert outcome.read_text() == "4\n"
    monkeypatch.setenv(OUTCOME, str(outcome / "there" / "is none"))
    note_outcome(4)


def test_last_words_that_cannot_be_left_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk, say: the launcher would know nothing of the cause."""
    monkeypatch.setenv(MEETING, str(tmp_path / "gone"))
    tell(1, "boom", RankInfo(3, 4, 3))
    assert "megalite: rank 3: boom\n" in capsys.readouterr().err


def test_an_interrupt_that_was_held_up_is_one_line(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = program("""
        from megalite.distributed.start.ranks import find_rank_info
        from megalite.distributed.start.start import run_rank

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        os.kill(os.getpid(), signal.SIGINT)
        sys.exit(run_rank(lambda: 0, find_rank_info()))
    """)
    assert launch(module, [str(tmp_path)], 1, tmp_path / "logs") == 130
    assert capfd.readouterr().err == "megalite: rank 0: interrupted\n"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"run\.device=cuda: this node runs at least 4 ranks but has 2 GPUs"):
        start(RankInfo(3, 4, 3), "cuda", 1.0)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_the_address_of_rank_0_must_be_known(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv(MEETING, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(missing)
    with pytest.raises(InputError, match=f"^{missing} must name"):
        start(RankInfo(0, 1, 0), "cpu", 1.0)


@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("cuda", 0)])
def test_a_rank_keeps_memory_that_it_has_freed_where_it_is_on_a_cpu(
    device: Literal["cpu", "cuda"], calls: int, keeps: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert start(RankInfo(0, 1, 0), device, 1.0).type == device
    assert keeps.call_count == calls
