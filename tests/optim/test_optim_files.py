"""Optimizer states in files: the bits of training without, in every layout; and what happens when a drive fails."""

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from file_cases import CASES, SPARSE, STEPS, case, differences, in_files, placed, small_slots
from ranks import Ranks
from toy_jobs import advance, load_and_train, make, one_rank, parts, progress_at, restorer, save, saver

from megalite.base.errors import InputError, Unhealthy
from megalite.base.exit_codes import ExitCode
from megalite.config.layout import Layout
from megalite.data.store_writer import StoreWriter
from megalite.optim import file_pieces, scratch_file
from megalite.optim.scratch_file import ScratchFile
from megalite.plan.state_streams import BLOCK

HERE = {name: case(Layout(), optimizer=name) for name in ("adamw", "muon")}
Move = Callable[[int, Sequence[Any], int], int]


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].values, other[name].values) for name in one)


@pytest.mark.timeout(300)
def test_states_elsewhere_change_no_bit_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    assert len(CASES) >= 12
    assert [found for found in ranks.run(differences, str(tmp_path)) if found] == []
    assert list(tmp_path.iterdir()) == []


@contextmanager
def moves(name: str, change: Callable[[Move], Move]) -> Iterator[None]:
    """Replace `os.preadv` or `os.pwritev` as scratch files use it, once they are open."""
    with patch.object(os, name, change(getattr(os, name))):
        yield


def failing(number: int) -> Callable[[Move], Move]:
    def change(move: Move) -> Move:
        def fail(descriptor: int, buffers: Sequence[Any], at: int) -> int:
            raise OSError(number, os.strerror(number))

        return fail

    return change


def shortened(move: Move) -> Move:
    """Move two blocks at most, and tell of fewer bytes than have been moved, as after an interruption."""

    def short(descriptor: int, buffers: Sequence[Any], at: int) -> int:
        return max(move(descriptor, [buffers[0][: 2 * BLOCK]], at) - 100, BLOCK)

    return short


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("which", ["preadv", "pwritev"])
def test_short_reads_and_writes_go_on(name: str, which: str, tmp_path: Path) -> None:
    with one_rank():
        here, there = make(HERE[name]), in_files(HERE[name], tmp_path)
        with moves(which, shortened):
            assert advance(here, 0, STEPS) == advance(there, 0, STEPS)
        assert same(parts(here), parts(there))


@pytest.mark.parametrize(("which", "done"), [("preadv", "read"), ("pwritev", "written")])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (failing(errno.EIO), "Input/output error"),
        (failing(errno.ENOSPC), "No space left on device"),
        (lambda _: lambda *__: 0, "only 0 bytes at a time"),
    ],
    ids=["EIO", "ENOSPC", "nothing moves"],
)
def test_a_drive_that_fails_ends_training_with_one_message_and_the_checkpoint_goes_on(
    change: Callable[[Move], Move], reason: str, which: str, done: str, tmp_path: Path
) -> None:
    config = HERE["adamw"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with one_rank():
        losses = advance(make(config), 0, STEPS)
        job = in_files(config, scratch)
        advance(job, 0, 2)
        with saver(job, tmp_path) as writer:
            writer.save(progress_at(job, 2))
            writer.finish()
        rule = rf"optim\.placement = {scratch}: states at byte [0-9,]+ cannot be {done}: {reason}"
        with moves(which, change), pytest.raises(Unhealthy, match=rule):
            advance(job, 2, 3)
        with small_slots():
            *_, again, _ = load_and_train(placed(config, str(scratch)), tmp_path / "step-00000002", STEPS)
        assert again == losses[2:]


@pytest.mark.parametrize("copied", [True, False], ids=["async", "at once"])
@pytest.mark.parametrize(("which", "done"), [("preadv", "read"), ("pwritev", "written")])
def test_a_drive_that_fails_while_a_checkpoint_uses_it_ends_with_the_same_message(
    which: str, done: str, copied: bool, tmp_path: Path
) -> None:
    config = replace(HERE["adamw"], checkpoint=replace(HERE["adamw"].checkpoint, async_=copied))
    (scratch := tmp_path / "scratch").mkdir()
    rule = rf"^optim\.placement = {scratch}: states at byte [0-9,]+ cannot be {done}: Input/output error"
    with one_rank():
        losses = advance(make(config), 0, STEPS)
        job = in_files(config, scratch)
        advance(job, 0, 2)
        whole = save(job, tmp_path, 2)
        if which == "preadv" or copied:  # a save at once only reads
            with pytest.raises(Unhealthy, match=rule), moves(which, failing(errno.EIO)):
                save(job, tmp_path, 3)
        assert [*tmp_path.glob("step-*")] == [whole]
        if which == "pwritev":
            job = in_files(config, scratch)
            with moves(which, failing(errno.EIO)), pytest.raises(Unhealthy, match=rule):
                restorer(job).all(whole)
        *_, again, _ = load_and_train(config, whole, STEPS)
    assert again == losses[2:]


@pytest.mark.parametrize("name", ["adamw", "muon", "experts"])
def test_a_run_touches_no_mapped_memory_of_a_file(name: str, tmp_path: Path) -> None:
    """Were the drive to fail there, Linux would end the process."""
    config = (HERE | {"experts": case(Layout(), optimizer="muon", model=SPARSE)})[name]
    mapped = scratch_file.mmap

    def elsewhere(descriptor: int, size: int) -> Any:
        return mapped(-1, size)

    with one_rank(), small_slots(), patch.object(file_pieces, "BUCKET_BYTES", 5000):
        here = make(config)
        losses = advance(here, 0, STEPS)
        with patch.object(scratch_file, "mmap", elsewhere):
            job = make(placed(config, str(tmp_path)))
            assert advance(job, 0, 2) == losses[:2]
            with saver(job, tmp_path) as writer:
                writer.save(progress_at(job, 2))
                assert advance(job, 2, STEPS) == losses[2:]
                writer.finish()
            again = make(placed(replace(config, run=replace(config.run, seed=99)), str(tmp_path)))
            restorer(again, job.config).all(tmp_path / "step-00000002")
            assert advance(again, 2, STEPS) == losses[2:]
        assert same(load_and_train(config, tmp_path / "step-00000002", STEPS)[-1], parts(here))


def test_a_folder_that_vanishes_costs_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "scratch").mkdir()
    with one_rank():
        here, there = make(HERE["adamw"]), in_files(HERE["adamw"], folder)
        shutil.rmtree(folder)
        assert advance(here, 0, STEPS) == advance(there, 0, STEPS)


def test_two_runs_share_a_folder(tmp_path: Path) -> None:
    with one_rank():
        alone = advance(make(HERE["adamw"]), 0, STEPS)
        one, other = in_files(HERE["adamw"], tmp_path), in_files(HERE["adamw"], tmp_path)
        pairs = [(advance(one, step, step + 1)[0], advance(other, step, step + 1)[0]) for step in range(STEPS)]
    assert pairs == [(loss, loss) for loss in alone]


@pytest.mark.parametrize("lacks", ["O_DIRECT", "O_TMPFILE"])
def test_file_systems_that_lack_something_do(lacks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened, controlled = os.open, fcntl.fcntl

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, *rest, **named)

    def control(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return controlled(descriptor, command, flags)

    lacking = {"O_TMPFILE": patch.object(os, "open", open_), "O_DIRECT": patch.object(scratch_file, "fcntl", control)}
    with one_rank():
        here = make(HERE["muon"])
        with lacking[lacks]:
            there = in_files(HERE["muon"], tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert advance(here, 0, STEPS) == advance(there, 0, STEPS)
    told = [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert len(told) == (lacks == "O_DIRECT")


def refusal(folder: Path) -> str:
    with one_rank(), pytest.raises(InputError) as found:
        in_files(HERE["adamw"], folder)
    return str(found.value)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    assert "is a link; name the folder that it leads to" in refusal(tmp_path / "link")
    assert "cannot be opened: Not a directory" in refusal(tmp_path / "file")
    assert "No such file or directory; make this folder on every node" in refusal(tmp_path / "none")
    assert (tmp_path / "file").read_text() == "mine"
    with patch.object(scratch_file, "_nameless", side_effect=OSError(errno.EACCES, "Permission denied")):
        assert "cannot be written to: Permission denied; name a folder in which you may write" in refusal(tmp_path)


def test_a_full_drive_is_told_at_the_start_with_the_bytes_needed_and_free(tmp_path: Path) -> None:
    with patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        told = refusal(tmp_path)
    assert "has no room for" in told
    with one_rank():
        job = make(HERE["adamw"])
        sizes = [param.to_local().nbytes for _, param in job.named_parameters()]  # type: ignore[attr-defined]
    needed = sum(2 * -(-size // BLOCK) * BLOCK for size in sizes)
    assert f"{needed:,} bytes of states of this rank: No space left on device" in told
    assert "bytes are free; make room, or name a folder on another drive" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", HERE)
def test_a_save_holds_its_moment_while_training_goes_on_and_takes_no_memory_for_states(
    name: str, tmp_path: Path
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    config = HERE[name]
    with one_rank():
        job, here = in_files(config, scratch), make(config)
        advance(job, 0, 2)
        losses = advance(here, 0, STEPS)
        with saver(job, tmp_path) as writer:
            writer.save(progress_at(job, 2))
            advance(job, 2, STEPS)
            file = writer._staging._file
            assert file is not None
            for each, copy in writer._staging._copies.items():
                inside = 0 <= copy.data_ptr() - file._start < len(file._bytes)
                assert inside is each.startswith("optimizer."), each
            writer.finish()
        for loading in (config, placed(config, str(scratch))):
            with small_slots():
                *_, again, after = load_and_train(loading, tmp_path / "step-00000002", STEPS)
            assert again == losses[2:]
            assert same(after, parts(here))
    assert list(scratch.iterdir()) == []


KILLED = """
import sys, time
from megalite.optim.scratch_file import ScratchFile
file = ScratchFile(sys.argv[1], 1 << 24, "optim.placement")
file.take(1 << 24).fill_(1)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir()) == [], "another run cannot take it for its own"
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


HANGING = """
import os, sys, time
from megalite.commands.main import main
move, calls, most = os.pwritev, 0, int(sys.argv.pop(1))
def hang(*given):
    global calls
    calls += 1
    time.sleep(600 * (calls > most))
    return move(*given)
os.pwritev = hang
sys.exit(main())
"""
CONFIG = """
run: {dir: runs, name: hung, device: cpu}
model: {layers: 1, width: 16, heads: 2, kv_heads: 2, ffn: 16, vocab_size: 64, sequence_length: 8}
batch: {micro: 2, global: 2}
train: {steps: 8, timeout: 4}
checkpoint: {interval: 2}
optim: {placement: ./scratch}
log: {tensorboard: false}
data: {train: [{path: tokens}]}
"""


@pytest.mark.timeout(300)
def test_a_drive_that_hangs_ends_the_run_with_where_it_waits_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run.yaml").write_text(CONFIG)
    with StoreWriter(tmp_path / "tokens", "<u2") as writer:
        writer.add(np.arange(512) % 64)

    def train(writes: int) -> tuple[int, str]:
        command = [sys.executable, "-c", HANGING, str(writes), "train", "run.yaml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, told = train(160)  # some steps and a save have written less
    assert code == ExitCode.LOST_CONTACT, told
    assert "no progress for 4 s (train.timeout)" in told
    assert re.search(r"rank 0 on .*: step \d, .* at megalite/optim/scratch_file.py:\d+ _move", told)
    code, told = train(1 << 30)
    assert code == 0, told
    assert "resuming at step" in told
    assert list((tmp_path / "scratch").iterdir()) == []


def test_bytes_that_are_taken_share_no_block(tmp_path: Path) -> None:
    file = ScratchFile(str(tmp_path), 3 * BLOCK, "optim.placement")
    first, second = file.take(100), file.take(2 * BLOCK)
    buffer = file.aligned(torch.empty(3 * BLOCK, dtype=torch.uint8))
    second.fill_(2)
    buffer.fill_(1)
    file.write(buffer, first)
    assert (first == 1).all()
    assert (second == 2).all()
    file.read(second, buffer)
    assert (buffer == 2).all()
    file.read(second[50:150], buffer.fill_(0))  # no whole block
    assert (buffer[:100] == 2).all()
    assert not buffer[100:].any()
