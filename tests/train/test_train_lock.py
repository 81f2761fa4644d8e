"""One job per run folder: of several one gets in, the dead lock nobody out, and who was overtaken hears of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.train.folder import lock
from megalite.train.folder.lock import Lock, Owner

ROUNDS = 20
TAKERS = """
import os, signal, sys
from pathlib import Path
from megalite.base.errors import InputError
from megalite.train.folder import lock

lock.LOOK_SECONDS = 0.01

def taker(run: Path, go: int, told: int) -> None:
    os.read(go, 1)
    try:
        lock.Lock.take(run)
        os.write(told, b"+")
        signal.pause()
    except InputError as error:
        os.write(told, b"-" if "another job trains in this folder, process" in str(error) else b"?")

for round in range({rounds}):
    run = Path(sys.argv[1]) / {name}
    (go, start), (heard, told) = os.pipe(), os.pipe()
    pids = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            os.close(start)
            taker(run, go, told)
            os._exit(0)
        pids.append(pid)
    os.write(start, b"xx")
    found = sorted(os.read(heard, 1).decode() for _ in pids)
    print("".join(found), flush=True)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
"""
ME = Owner.this()
ELSEWHERE = replace(ME, host="node7", machine="another")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(lock, "MAX_LOOKS", 8)
    monkeypatch.setattr(lock, "SUCCESSOR_LOOKS", 3)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another job."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def owned_by(run: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """The lock as `owner` has taken it."""
    with monkeypatch.context() as there:
        there.setattr(Owner, "this", staticmethod(lambda: owner))
        return Lock.take(run)


def refused(run: Path) -> str:
    with pytest.raises(InputError) as caught:
        Lock.take(run)
    return str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, who is dead is told by the heartbeat alone")
@pytest.mark.parametrize("name", ["str(round)", "'one'"], ids=["new", "killed"])
def test_of_two_jobs_at_once_one_gets_in(name: str, tmp_path: Path) -> None:
    """In a new folder, and in one whose owner was killed."""
    program = TAKERS.replace("{rounds}", str(ROUNDS)).replace("{name}", name)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["+-"] * ROUNDS


def test_the_owner_is_named(tmp_path: Path) -> None:
    Lock.take(tmp_path)
    told = refused(tmp_path)
    assert f"process {os.getpid()} on {ME.host}, since 2" in told
    assert str(tmp_path) in told


def test_who_ends_well_lets_others_in(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        taken = Lock.take(tmp_path)
        taken.free()
        numbers.append(taken.number)
    assert numbers == [1, 2, 3]
    assert sorted(os.listdir(tmp_path / "lock")) == ["3", "3.free"]


@pytest.mark.parametrize("began", [lock._began, lambda _: 0], ids=["killed", "its number used again"])
def test_a_dead_process_on_this_machine_holds_nothing(
    began: Callable[[int], int], tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = replace(ME, pid=child.pid, began=lock._began(child.pid) or 0)
    owned_by(tmp_path, owner, monkeypatch)
    assert f"process {child.pid} " in refused(tmp_path)
    if began is lock._began:
        child.kill()
        while lock._began(child.pid) != -1:  # a zombie will do
            time.sleep(0.01)
    monkeypatch.setattr(lock, "_began", began)
    monkeypatch.setattr(lock.time, "sleep", None)  # at once
    assert Lock.take(tmp_path).number == 2


def test_a_frozen_process_on_this_machine_is_not_overtaken(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    child.send_signal(signal.SIGSTOP)
    owned_by(tmp_path, replace(ME, pid=child.pid, began=lock._began(child.pid) or 0), monkeypatch)
    assert f"process {child.pid} " in refused(tmp_path)


def test_an_owner_elsewhere_that_gives_signs_of_life_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = owned_by(tmp_path, ELSEWHERE, monkeypatch)
    with theirs.beating(pytest.fail):
        monkeypatch.setattr(lock, "MAX_LOOKS", 10_000)
        assert f"process {os.getpid()} on node7" in refused(tmp_path)


def test_who_was_frozen_elsewhere_hears_who_has_taken_over_and_frees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = owned_by(tmp_path, ELSEWHERE, monkeypatch)
    assert theirs.lost() == ""
    taken = Lock.take(tmp_path)
    assert "waiting up to" in capsys.readouterr().err
    assert f"another job has taken over, process {os.getpid()} on {ME.host}" in theirs.lost()
    heard: list[str] = []
    with theirs.beating(heard.append):
        deadline = time.monotonic() + 30
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
    assert heard == [theirs.lost()]
    theirs.free()
    assert taken.lost() == ""
    refused(tmp_path)


@pytest.mark.parametrize(("attempt", "looks"), [("0.0", 8), ("1.0", 3)])
def test_another_attempt_of_the_same_job_waits_less(
    attempt: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned_by(tmp_path, replace(ELSEWHERE, job="Slurm job 5"), monkeypatch)
    slept: list[float] = []
    monkeypatch.setattr(lock.time, "sleep", slept.append)
    owned_by(tmp_path, replace(ME, job="Slurm job 5", attempt=attempt), monkeypatch)
    assert len(slept) == looks


def test_the_next_attempt_of_a_job_waits_for_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = owned_by(tmp_path, replace(ME, job="Slurm job 5"), monkeypatch)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            first.free()

    monkeypatch.setattr(lock.time, "sleep", sleep)
    assert owned_by(tmp_path, replace(ME, job="Slurm job 5", attempt="1.0"), monkeypatch).number == 2


@pytest.mark.parametrize(
    ("environment", "job", "attempt"),
    [
        ({}, "", "0.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "Slurm job 7", "2.0"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, "", "0.1"),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun a", "0.1"),
    ],
)
def test_jobs_are_known_by_their_launchers(environment: dict[str, str], job: str, attempt: str) -> None:
    owner = Owner.this(environment)
    assert (owner.job, owner.attempt) == (job, attempt)


def test_a_launcher_passes_its_lock_on_and_frees_it_when_the_heir_is_gone(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Lock.take(tmp_path)
    rank = replace(ME, pid=child.pid, began=lock._began(child.pid) or 0)
    with monkeypatch.context() as there:
        there.setattr(Owner, "this", staticmethod(lambda: rank))
        assert Lock.take(tmp_path, launcher=os.getpid()).number == 2
    ours.free()
    assert f"process {child.pid} " in refused(tmp_path)
    child.kill()
    child.wait()
    ours.free()
    assert sorted(os.listdir(tmp_path / "lock")) == ["2", "2.free"]


def test_who_acts_on_an_old_view_does_not_get_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look and its attempt, two others have owned the folder, and the number it tries is free again."""
    Lock.take(tmp_path).free()
    old = lock._look(tmp_path / "lock")
    Lock.take(tmp_path).free()
    owner = Lock.take(tmp_path)
    looks = iter([old])
    monkeypatch.setattr(lock, "_look", lambda folder, look=lock._look: next(looks, None) or look(folder))
    refused(tmp_path)
    assert owner.lost() == ""


@pytest.mark.parametrize("remove", ["lock/1", "lock", "."])
def test_an_owner_hears_that_its_lock_was_removed(remove: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ours = Lock.take(run)
    subprocess.run(["rm", "-r", run / remove if remove != "." else run], check=True)
    assert "the lock of this run was removed" in ours.lost()


def test_a_later_lock_of_the_same_number_is_not_ours(tmp_path: Path) -> None:
    ours = Lock.take(tmp_path)
    (tmp_path / "lock/1").unlink()
    parent = os.getppid()
    assert lock._create(tmp_path / "lock", 1, replace(ours.owner, pid=parent, began=lock._began(parent) or 0))
    assert "the lock of this run was removed" in ours.lost()
    ours.free()
    assert os.listdir(tmp_path / "lock") == ["1"]


@pytest.mark.parametrize("make", ["touch", "mkdir", "mkfifo", "ln -s nowhere"])
def test_what_is_no_owner_s_file_locks_nobody_out_for_good(
    make: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").mkdir()
    subprocess.run([*make.split(), str(tmp_path / "lock/5")], check=True)
    (tmp_path / "lock/notes.txt").touch()
    slept: list[float] = []
    monkeypatch.setattr(lock.time, "sleep", slept.append)
    assert Lock.take(tmp_path).number == 6
    assert len(slept) == (lock.MAX_LOOKS if make == "touch" else 0)  # an owner's file may be empty for a moment


@given(st.dictionaries(st.sampled_from([*asdict(ME), "more"]), st.integers()).map(json.dumps))
@example("[" * 4000)
@example("1" * 5000)
@example("\0")
def test_what_an_owner_s_file_says_can_be_anything(text: str) -> None:
    assert Owner.parse(text) is None
    assert Owner.parse(json.dumps(asdict(ME))) == ME


@pytest.mark.parametrize("pid", [-1, 0, 10**30])
def test_no_process_has_such_an_id(pid: int) -> None:
    assert replace(ME, pid=pid, began=-5).alive in (None, False)


@pytest.mark.parametrize("field", ["host", "job", "since"])
def test_what_could_steer_a_terminal_is_no_owner(field: str) -> None:
    assert Owner.parse(json.dumps(asdict(ME) | {field: "a\33]0;b\7"})) is None


def test_an_own_job_s_name_can_be_read_back() -> None:
    owner = Owner.this({"TORCHELASTIC_RUN_ID": "a\33[1m\nb"})
    assert (owner.job, Owner.parse(json.dumps(asdict(owner)))) == ("torchrun a?[1m?b", owner)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells of processes on Linux")
def test_a_process_may_have_any_name() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("ü".encode()[:1])  # as a long name has it that was cut off inside of a character
    try:
        assert lock._began(os.getpid()) == ME.began
    finally:
        comm.write_bytes(before)


def test_who_may_be_at_work_is_told_without_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Lock.holder(tmp_path) is None
    assert os.listdir(tmp_path) == []
    held = Lock.take(tmp_path)
    assert Lock.holder(tmp_path) == held.owner
    held.free()
    assert Lock.holder(tmp_path) is None
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    owned_by(tmp_path, replace(ELSEWHERE, job="Slurm job 5", attempt="0.0"), monkeypatch)
    assert Lock.holder(tmp_path) == replace(ELSEWHERE, job="Slurm job 5", attempt="0.0")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Lock.holder(tmp_path) is None


def test_an_old_list_of_the_folder_is_not_asked_for_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS may give it: a number that is said to be free is taken."""
    old = lock.LockLook(0, True)
    Lock.take(tmp_path).free()
    slept: list[float] = []
    monkeypatch.setattr(lock.time, "sleep", slept.append)
    looks = iter([old] * 3)
    monkeypatch.setattr(lock, "_look", lambda folder, look=lock._look: next(looks, None) or look(folder))
    assert Lock.take(tmp_path).number == 2
    assert slept == [lock.LOOK_SECONDS] * 3


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert f"{tmp_path / 'run/lock'}: cannot be read and written: Not a directory" in refused(tmp_path / "run")


def test_a_lock_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (tmp_path / f"lock/1{lock.FREE_SUFFIX}").symlink_to(tmp_path / "made")
    held = Lock.take(tmp_path)
    (tmp_path / f"lock/{held.number}{lock.FREE_SUFFIX}").symlink_to(tmp_path / "made")
    held.free()
    assert not (tmp_path / "made").exists()


def test_a_lock_s_folder_leads_nowhere_else(tmp_path: Path) -> None:
    """The files of lower numbers in there are removed."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/1").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(tmp_path / "victim")
    assert f"{tmp_path / 'run/lock'}: is a link" in refused(tmp_path / "run")
    assert [path.name for path in (tmp_path / "victim").iterdir()] == ["1"]
