"""Ranks, checks and the guard as steps of a job, with stand-ins for the commands of Slurm."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite_launch.base.slurm import Answer, Slurm
from megalite_launch.supervise.backend import Start
from megalite_launch.supervise.slurm_backend import PORTS, Options, SlurmBackend

# Writes its arguments down. With a node in `bad`, the check of it fails, and with one in `frozen` it never ends.
SRUN = """#!/usr/bin/env python3
import os, signal, sys, time
nodes = next(word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist=")).split(",")
with open(os.environ["CALLS"], "a") as calls:
    print(*sys.argv[1:], sep="\\t", file=calls)
if set(nodes) & set(os.environ.get("FROZEN", "").split()):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.environ["CALLS"] + ".frozen", "w").close()
    time.sleep(60)
if len(open(os.environ["CALLS"]).readlines()) <= int(os.environ.get("AWAY", "0")):
    sys.exit("srun: error: Unable to create step for job 7: Unable to contact slurm controller (connect failure)")
for node in sorted(set(nodes) & set(os.environ.get("BAD", "").split())):
    print("ECC errors on " + node)
    print("srun: error: " + node + ": task 0: Exited with exit code 69", file=sys.stderr)
    sys.exit(69)
if "--output" in " ".join(sys.argv):
    print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["MEGALITE_ATTEMPT"], os.environ.get("RANK"))
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an srun in it, for all commands of this test."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (tools / "sinfo").write_text('#!/bin/sh\nprintf "$DRAINED"\n')
    (tools / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    return tmp_path


def backend(slurm: Path, **options: object) -> SlurmBackend:
    return SlurmBackend(Slurm("7"), 0, slurm, Options(2, **options), time.sleep)  # type: ignore[arg-type]


def calls(slurm: Path) -> list[list[str]]:
    return [line.split("\t") for line in (slurm / "calls").read_text().splitlines()]


def start(slurm: Path, name: str = "7.0.0") -> Start:
    logs = slurm / "logs %" / name
    logs.mkdir(parents=True)
    return Start(name, slurm / "attempts" / name, logs, ("n1", "n2"), 0)


def test_ranks_get_their_place_from_srun_alone(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")  # of a launcher around this one
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    how = backend(slurm, srun=["--container-image=a b"], master="127.0.0.1")
    ranks = how.start(start(slurm), ["train", "$(touch hurt)", "a b"])
    assert ranks.process.wait(30) == 0
    (words,) = calls(slurm)
    assert words[-3:] == ["train", "$(touch hurt)", "a b"]
    assert words[-5] == "env"
    assert {"--overlap", "--kill-on-bad-exit=1", "--distribution=block", "--container-image=a b"} < set(words)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--nodelist=n1,n2", "--cpus-per-task=4"} < set(words)
    assert f"--output={slurm}/logs %%/7.0.0/%N-%t.log" in words
    (said,) = ranks.said()
    address, port, attempt, rank = said.split()
    assert (address, attempt, rank) == ("127.0.0.1", str(slurm / "attempts" / "7.0.0"), "None")
    assert int(port) == PORTS[7 * 31]


def test_a_port_at_which_somebody_listens_is_not_taken(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("megalite_launch.supervise.slurm_backend.PORTS", [port, 1])
        ranks = backend(slurm, master="127.0.0.1").start(start(slurm), ["train"])
        assert ranks.process.wait(30) == 0
        assert ranks.said()[0].split()[1] == "1"


def test_nodes_are_examined_and_tell_what_is_wrong(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD", "n2")
    monkeypatch.setenv("FROZEN", "n3")
    command = ["check", "--{mode}", "{attempt}"]
    how = backend(slurm, preflight="full", preflight_command=command, preflight_seconds=4.0)
    bad = how.examine(["n1", "n2", "n3"], slurm, True, lambda: False)
    assert bad == {"n2": "ECC errors on n2", "n3": "gave no answer within 4 s"}
    assert {words[-1] for words in calls(slurm)} == {str(slurm)}
    assert {words[-2] for words in calls(slurm)} == {"--full"}
    how.examine(["n1"], slurm, False, lambda: False)
    assert calls(slurm)[-1][-2] == "--light"


def test_an_examination_ends_when_the_job_is_to_stop(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN", "n1")
    began = time.monotonic()
    assert set(backend(slurm).examine(["n1"], slurm, True, lambda: True)) == {"n1"}
    assert time.monotonic() - began < 30


def test_many_nodes_are_examined_in_groups_and_only_bad_groups_one_by_one(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite_launch.supervise.slurm_backend.MAX_SRUNS", 3)
    monkeypatch.setenv("BAD", "n5")
    nodes = [f"n{number}" for number in range(1, 9)]
    assert backend(slurm).examine(nodes, slurm, False, lambda: False) == {"n5": "ECC errors on n5"}
    asked = sorted(next(word for word in words if word.startswith("--nodelist"))[11:] for words in calls(slurm))
    assert asked == sorted(["n1,n2,n3", "n4,n5,n6", "n7,n8", "n4", "n5", "n6"])


def test_one_node_has_no_guard(slurm: Path) -> None:
    how = backend(slurm)
    how._names = ["n1"]
    how.begin()
    how.end()
    assert calls(slurm) == []


def test_the_guard_is_a_step_of_the_last_node(slurm: Path) -> None:
    how = backend(slurm)
    how._names = ["n1", "n2", "n3"]
    how.begin()
    assert how._guard is not None
    how._guard.wait(30)
    how.begin()  # anew, as it is gone
    how._guard.wait(30)
    how.end()
    first, second = (slurm / "calls").read_text().split("--job-name=megalite-guard")[1:]
    assert first == second
    assert "--nodelist=n3" in first
    assert how.beat.read_bytes() == b"over\n"


def test_a_guard_whose_srun_hangs_does_not_outlive_the_supervisor(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROZEN", "n2")
    how = backend(slurm)
    how._names = ["n1", "n2"]
    how.begin()
    assert how._guard is not None
    while not (slurm / "calls.frozen").exists():
        time.sleep(0.01)
    how.end()
    assert how._guard.returncode == -signal.SIGKILL


def test_a_check_that_srun_itself_fails_to_start_is_made_again(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Slurm's controller restarts: this speaks against no node."""
    monkeypatch.setenv("AWAY", "3")
    monkeypatch.setenv("BAD", "n2")
    how = backend(slurm)
    assert how.examine(["n1", "n2"], slurm, False, lambda: False) == {"n2": "ECC errors on n2"}
    assert len(calls(slurm)) > 3
    monkeypatch.setenv("AWAY", "99")
    bad = backend(slurm, patience=0.5).examine(["n1"], slurm, False, lambda: False)
    assert "Unable to contact slurm controller" in bad["n1"]
    looks = iter([False] * 3)
    began = time.monotonic()
    assert set(backend(slurm).examine(["n1"], slurm, False, lambda: next(looks, True))) == {"n1"}
    assert time.monotonic() - began < 30


def test_nodes_that_were_drained_are_left_alone(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = "n2|draining|a fan is loud\n"
    monkeypatch.setenv("DRAINED", f"n1|allocated|none\n{loud}n3|down*|Not responding\nn4|mixed|none\n{loud}")
    bad = backend(slurm).examine(["n1", "n2", "n3", "n4"], slurm, False, lambda: False)
    assert bad == {"n2": "draining: a fan is loud", "n3": "down*: Not responding"}
    asked = {next(word for word in words if word.startswith("--nodelist"))[11:] for words in calls(slurm)}
    assert asked == {"n1", "n4"}


def test_ranks_that_could_not_be_killed_without_a_controller_are_killed_before_the_next_attempt(slurm: Path) -> None:
    asked: list[list[str]] = []
    answers = [Answer(1, "", "Unable to contact slurm controller"), Answer(0, "7.3 train\n", ""), Answer(0, "", "")]

    def call(command: Sequence[str]) -> Answer:
        asked.append(list(command))
        return answers.pop(0) if command[0] == "squeue" else Answer(0, "", "")

    how = SlurmBackend(Slurm("7", call), 0, slurm, Options(2, master="127.0.0.1"), time.sleep)
    how._names = ["n1"]
    ranks = how.start(start(slurm), ["train"])
    ranks.kill(time.sleep)
    assert ranks.left
    how.begin()
    assert not ranks.left
    assert ["scancel", "--signal=KILL", "7.3"] in asked
    how.begin()
    assert answers == []
    how.end()
