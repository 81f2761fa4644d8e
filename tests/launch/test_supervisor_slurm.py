"""The supervisor on a cluster of two nodes, with Slurm's own daemons on this machine, and faults that are real."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in
import supervised_job
from slurm_cluster import NODES, Cluster, missing
from supervised_job import Case

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
ENDLESS = ("--steps", "1000000")
# Runs on the batch host in place of Slurm's commands, which fail while a file is there.
BROKEN = """#!/bin/sh
if [ -e {folder}/broken ]; then echo "Socket timed out on send/recv operation" >&2; exit 1; fi
exec {command} "$@"
"""


@pytest.fixture(scope="module")
def cluster(work: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("supervised"), work.environment) as cluster:
        yield cluster


Submit = Callable[..., Case]


@pytest.fixture(scope="module")
def submit(work: SimpleNamespace, cluster: Cluster) -> Submit:
    def submit(name: str, *arguments: str, sbatch: tuple[str, ...] = (), **more: Any) -> Case:
        where = (f"--chdir={work.folder}", *sbatch)
        return supervised_job.submit(cluster, name, *arguments, sbatch=where, **more)

    return submit


@pytest.fixture(scope="module")
def cases(submit: Submit) -> dict[str, Case]:
    """Jobs that need nobody to do anything to them, side by side."""
    limit = ("--pause", "0.2", *ENDLESS)
    return {
        "limit": submit("limit", *limit, sbatch=("--time=1",)),
        "warned": submit("warned", *limit, sbatch=("--time=1", "--signal=B:USR2@5")),
        "finish": submit("finish"),
        "spare": submit("spare", "--fail", "1", "--at", "8", supervisor=("--spares", "1")),
        "error": submit("error", "--fail", "1", "--at", "8", "--rank", "3"),
        "bad": submit("bad", "--fail", "2", "--at", "3"),
        "full": submit("full", "--full", "10"),
        "spin": submit("spin", "--fail", "1", "--at", "8", "--rank", "3", "--once", "--spin"),
    }


def test_training_that_finishes(cases: dict[str, Case]) -> None:
    case = cases["finish"]
    assert case.ended() == ("COMPLETED", "0:0", "0"), case.log
    assert case.causes() == ["finished"]
    assert stand_in.recorded(case.run) == stand_in.curve(20)
    logs = [path for path in (case.run / "logs" / f"{case.job}.0.0").iterdir() if path.name != "srun.log"]
    assert sorted(path.name.rpartition("-")[2] for path in logs) == [f"{rank}.log" for rank in range(4)]
    assert {path.read_text().split()[-1] for path in logs} == set(NODES)


def test_an_error_that_comes_back_ends_the_job(cases: dict[str, Case]) -> None:
    case = cases["error"]
    assert case.ended() == ("FAILED", "1:0", "0"), case.log
    assert case.causes() == ["crash"] * 4  # the first has saved step 5
    assert "3 attempts in a row have saved no newer checkpoint: rank 3 on 127.0.0.2: failed at step 8" in case.log
    assert case.all("attempt_ended")[0]["first"]["node"] == NODES[1]


def test_a_spare_takes_the_place_of_a_node_that_fails_twice(cases: dict[str, Case]) -> None:
    case = cases["spare"]
    assert case.ended() == ("FAILED", "1:0", "0"), case.log
    assert [event["nodes"] for event in case.all("attempt")] == [[NODES[0]], [NODES[0]], [NODES[1]], [NODES[1]]]
    assert [event["node"] for event in case.all("left_out")] == [NODES[0]]


@pytest.mark.parametrize(("name", "code", "cause"), [("bad", 2, "bad_input"), ("full", 4, "unhealthy")])
def test_bad_input_and_a_full_disk_end_the_job_at_once(cases, name: str, code: int, cause: str) -> None:
    case = cases[name]
    assert case.ended() == ("FAILED", f"{code}:0", "0"), case.log
    assert case.causes() == [cause]


def test_ranks_that_spin_after_a_failure_are_reaped(cases: dict[str, Case]) -> None:
    case = cases["spin"]
    assert case.ended() == ("COMPLETED", "0:0", "0"), case.log
    assert case.causes() == ["crash", "finished"]
    assert len(case.all("reaped")) == 1
    assert stand_in.recorded(case.run) == stand_in.curve(20)


def test_a_killed_rank_and_a_stopped_rank_start_the_others_anew(submit: Submit) -> None:
    case = submit("rank", *ENDLESS)
    case.trains()
    os.kill(case.ranks(3), signal.SIGKILL)
    began = time.monotonic()
    case.until(lambda: len(case.all("attempt")) == 2, "the second attempt")
    case.trains()
    assert time.monotonic() - began < 10
    os.kill(case.ranks(2), signal.SIGSTOP)
    case.until(lambda: len(case.all("attempt")) == 3, "the third attempt")
    case.trains()
    killed, stopped = case.all("attempt_ended")
    assert (killed["cause"], killed["first"]["rank"], killed["first"]["node"]) == ("killed", 3, NODES[1])
    assert stopped["cause"] == "lost_contact"
    assert "rank 2 gave no sign of life" in stopped["first"]["text"]
    case.cluster.run("scancel", case.job)
    assert case.ended()[::2] == ("CANCELLED", "0"), case.log
    assert len(case.all("left_out")) == 0  # there is no spare, and one node would be too few
    states = stand_in.recorded(case.run)
    assert states == stand_in.curve(len(states))


@pytest.mark.parametrize("early", [True, False], ids=["first moment", "later"])
def test_a_signal_to_the_batch_script_saves_and_requeues(submit: Submit, early: bool) -> None:
    case = submit(f"signal-{early}", *ENDLESS)
    if early:
        os.kill(case.first_process(), signal.SIGUSR1)
    else:
        case.trains()
        case.cluster.run("scancel", "--batch", "--signal=USR1", case.job)
    case.restarted()
    assert case.causes() == ([] if early else ["stopped"])
    case.cluster.run("scancel", case.job)
    assert case.ended()[::2] == ("CANCELLED", "1"), case.log
    assert len(case.all("requeue")) == 1
    states = stand_in.recorded(case.run)
    assert states == stand_in.curve(len(states))


def test_a_job_cancelled_while_it_saves_stays_cancelled(submit: Submit) -> None:
    case = submit("saving", *ENDLESS, "--saving", "2")
    case.until(lambda: bool(list(case.run.glob("attempts/*/saving"))), "a save")
    case.cluster.run("scancel", case.job)
    assert case.ended()[::2] == ("CANCELLED", "0"), case.log
    assert case.causes() == ["stopped"]  # after its save
    assert not case.all("requeue")
    assert case.all("not_requeued")
    states = stand_in.recorded(case.run)
    assert states == stand_in.curve(len(states))
    time.sleep(7)  # cred_expire is 5 s, after which a requeued job would start
    assert case.cluster.job(case.job)["JobState"] == "CANCELLED"


def test_no_requeue_and_a_slurm_that_fails_for_a_while(submit: Submit, cluster: Cluster) -> None:
    tools = cluster.folder / "broken tools"
    tools.mkdir()
    for name in ("scontrol", "squeue"):
        (tools / name).write_text(BROKEN.format(folder=shlex.quote(str(tools)), command=f"/usr/bin/{name}"))
        (tools / name).chmod(0o755)
    kept = submit("kept", *ENDLESS, sbatch=("--no-requeue",))
    busy = submit("busy", *ENDLESS, path=f"{tools}:")
    busy.trains()
    kept.trains()
    (tools / "broken").touch()
    cluster.run("scancel", "--signal=USR1", busy.job)
    cluster.run("scancel", "--signal=USR1", kept.job)  # to the steps alone
    busy.until(lambda: bool(busy.all("attempt_ended")), "the end of the attempt")
    time.sleep(2)
    (tools / "broken").unlink()
    busy.restarted()
    assert kept.ended() == ("FAILED", "3:0", "0"), kept.log
    assert "--no-requeue" in kept.all("not_requeued")[0]["reason"]
    rival = submit("rival", run=busy.run, sbatch=(f"--output={cluster.folder}/rival.log",))
    assert rival.ended() == ("FAILED", "2:0", "0")
    assert f"Slurm job {busy.job} is at work in this run folder" in (cluster.folder / "rival.log").read_text()
    before = busy.events
    how = ("--backend", "local", "--run", str(busy.run), "--", sys.executable, "-c", "")
    local = subprocess.run(
        [sys.executable, "-m", "megalite_launch", "supervise", *how], capture_output=True, timeout=60
    )
    assert (local.returncode, local.stderr.decode().count(f"Slurm job {busy.job} is at work")) == (2, 1)
    assert [event["event"] for event in busy.events[len(before) :]] == ["refused"]
    cluster.run("scancel", busy.job)
    assert busy.ended()[::2] == ("CANCELLED", "1")


def test_training_itself_goes_on_after_a_kill_and_after_a_stop(submit, work, expected: list[float]) -> None:
    config = ("config.yaml", "run.name=supervised", "train.steps=40", "checkpoint.interval=5", "schedule.warmup=2")
    config += ("parallel.pp=1",)
    done = work.run("megalite", "train", *config, "run.name=undisturbed")
    assert done.returncode == 0, done.stderr
    run = work.folder / "runs" / "supervised"
    check = shlex.join(["megalite", "train", "--check", "--world-size", "{ranks}", *config])
    case = submit(
        "supervised",
        *config,
        command=("megalite", "train"),
        run=run,
        supervisor=("--check", check, "--ranks-per-node", "1"),
    )
    case.until(lambda: case.steps() > 8, "training")
    os.kill(case.ranks(1), signal.SIGKILL)
    case.until(lambda: len(case.all("attempt")) == 2, "the second attempt")
    seen = case.steps()
    case.until(lambda: case.steps() > seen + 3, "training again")
    case.cluster.run("scancel", "--signal=USR1", case.job)
    assert case.ended() == ("COMPLETED", "0:0", "1"), case.log
    assert case.causes() == ["killed", "stopped", "finished"]
    assert curve(run) == curve(work.folder / "runs" / "undisturbed")


def curve(run: Path) -> dict[int, float]:
    """The loss of every step as it was recorded last."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found[record["step"]] = record["loss"]
    return found


def test_the_time_limit(cases: dict[str, Case]) -> None:
    limit, warned = cases["limit"], cases["warned"]
    assert limit.ended()[::2] == ("TIMEOUT", "0"), limit.log
    assert limit.all("attempt_ended")[0]["cause"] == "stopped"  # on Slurm's SIGTERM
    assert "TimeLimit" in limit.all("not_requeued")[0]["reason"]
    assert stand_in.recorded(limit.run) == stand_in.curve(len(stand_in.recorded(limit.run)))
    warned.until(lambda: bool(warned.all("requeue")), "the job requeued before its limit")
    warned.cluster.run("scancel", warned.job)
    assert warned.ended()[0] == "CANCELLED"


def test_a_preempted_job_makes_room_and_comes_back(submit: Submit, cluster: Cluster) -> None:
    plain = submit("plain", *ENDLESS)
    user = submit("user", *ENDLESS, sbatch=("--signal=USR1@60",))
    plain.trains()
    user.trains()
    first = cluster.run(
        "sbatch", "--parsable", "-phigh", "-N2", "--exclusive", f"--output={cluster.folder}/high", "--wrap=sleep 1"
    )
    began = time.monotonic()
    cluster.until(lambda: cluster.job(first)["JobState"] != "PENDING", "the preemptor")
    assert time.monotonic() - began < 8
    for case in (plain, user):
        case.restarted()
        assert case.causes()[0] == "stopped"
        cluster.run("scancel", case.job)
        assert case.ended()[::2] == ("CANCELLED", "1"), case.log
        states = stand_in.recorded(case.run)
        assert states == stand_in.curve(len(states))


def test_a_frozen_node_is_left_behind(submit: Submit, cluster: Cluster) -> None:
    case = submit("frozen", "--steps", "240", supervisor=("--min-nodes", "1", "--preflight-seconds", "3"))
    case.trains()
    began, processes = time.monotonic(), cluster.freeze(NODES[1])
    try:
        case.until(lambda: len(case.all("attempt")) == 2, "the second attempt")
        took = time.monotonic() - began
        assert cluster.wait(case.job)["JobState"] == "COMPLETED", case.log
    finally:
        cluster.thaw(processes)
    assert took < stand_in.LOST + 20  # whatever SlurmdTimeout
    assert case.all("attempt")[1]["nodes"] == [NODES[0]]
    assert case.all("attempt_ended")[0]["first"]["node"] == NODES[1]
    assert stand_in.recorded(case.run) == stand_in.curve(240)
    assert case.ended()[0] == "COMPLETED"


def test_a_controller_that_restarts_and_a_node_that_is_drained(submit: Submit, cluster: Cluster) -> None:
    cluster.until(cluster.idle, "two idle nodes")
    case = submit("controller", *ENDLESS, supervisor=("--min-nodes", "1"))
    case.trains()
    cluster.stop_controller()
    try:
        os.kill(case.ranks(3), signal.SIGKILL)
        case.until(lambda: bool(case.all("attempt_ended")), "the end of the attempt")
        time.sleep(3)
    finally:
        cluster.start_controller()
    case.until(lambda: len(case.all("attempt")) == 2, "the second attempt")
    case.trains()
    assert [event["ok"] for event in case.all("preflight")] == [list(NODES)] * 2  # srun's own errors were not theirs
    cluster.run("scontrol", "update", f"nodename={NODES[1]}", "state=drain", "reason=a fan is loud")
    try:
        os.kill(case.ranks(2), signal.SIGKILL)
        case.until(lambda: len(case.all("attempt")) == 3, "the third attempt")
        case.trains()
    finally:
        cluster.run("scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    assert case.all("attempt")[2]["nodes"] == [NODES[0]]
    assert "a fan is loud" in case.all("preflight")[2]["bad"][NODES[1]]
    cluster.run("scancel", case.job)
    assert case.ended()[::2] == ("CANCELLED", "0"), case.log
    assert case.causes()[1] == "killed"  # srun may have heard nothing of the first end
    states = stand_in.recorded(case.run)
    assert states == stand_in.curve(len(states))


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "frozen"])
def test_the_guard_requeues_a_job_without_its_batch_host(submit: Submit, cluster: Cluster, dead: bool) -> None:
    cluster.until(cluster.idle, "two idle nodes")
    case = submit(f"host-{dead}", *ENDLESS, supervisor=("--guard-seconds", "6"))
    case.trains()
    processes = [] if dead else cluster.freeze(NODES[0])
    if dead:
        cluster.crash(NODES[0])
    try:
        case.until(lambda: bool(case.all("guard")), "the guard's decision")
        if dead:
            case.until(lambda: cluster.job(case.job)["Restarts"] == "1", "the job requeued")
    finally:  # so that the tests after this one have both nodes
        if dead:
            cluster.revive(NODES[0])
        time.sleep(1)
        cluster.thaw(processes)  # the supervisor too, which finds that the job has gone on without it
    case.restarted()
    cluster.run("scancel", case.job)
    assert case.ended()[::2] == ("CANCELLED", "1"), case.log
    states = stand_in.recorded(case.run)
    assert states == stand_in.curve(len(states))
