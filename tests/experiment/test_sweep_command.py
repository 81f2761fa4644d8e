"""megalite-sweep with a stand-in for training: every state, what is done again, budgets, signals."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from faked import BASE, Faked

from megalite_launch.base.texts import lasting

ENDS = ["done", "oom", "diverged", "unsaved", "bad", "crash", "lie", "hang", "lost"]
STATES = ["done", "oom", "diverged", "failed", "failed", "failed", "failed", "timeout", "failed"]
RATES = [round(0.01 * (number + 1), 2) for number in range(len(ENDS))]
SLUGS = [f"lr{rate:g}" for rate in RATES]


def test_every_state_and_what_is_started_again(tmp_path: Path) -> None:
    script = {slug: [end] for slug, end in zip(SLUGS, ENDS, strict=True)}
    launch = {"parallel": 3, "attempts": 2, "minutes": 0.2}  # of which the slowest takes all
    faked = Faked(tmp_path, script, grid={"optim.lr": RATES}, launch=launch)
    told = faked.sweep("launch", code=1)
    assert faked.states() == dict(zip(SLUGS, STATES, strict=True))
    assert "torch.OutOfMemoryError: CUDA out of memory" in told.stderr
    assert "1 done, 1 oom, 1 diverged, 1 timeout, 5 failed" in told.stdout
    starts = faked.starts()
    assert [starts[slug] for slug in SLUGS[:5]] == [1, 1, 1, 1, 1]  # out of memory is a result
    assert starts[SLUGS[5]] == 2  # a crash may pass: it was tried twice
    assert "nothing to start" in faked.sweep("launch", code=1).stdout
    assert faked.starts() == starts
    with (tmp_path / "experiments/exp/index.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == STATES
    assert [float(row["optim.lr"]) for row in rows] == RATES

    faked.script({"": ["done"]})
    faked.sweep("launch", "--only", "failed,timeout", code=1)
    assert faked.states() == {**dict.fromkeys(SLUGS, "done"), SLUGS[1]: "oom", SLUGS[2]: "diverged"}
    assert faked.run_again() == []
    assert faked.statuses()[SLUGS[7]]["attempts"] == 2

    (tmp_path / "experiments/exp/index.csv").unlink()
    faked.sweep("collect")
    with (tmp_path / "experiments/exp/results.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["status"] for row in found] == ["done", "oom", "diverged"] + ["done"] * 6
    assert float(found[0]["loss_train"]) == pytest.approx(2 + 0.01 + 1 / 10)
    assert (found[1]["loss_train"], found[0]["loss_valid"]) == ("", "")
    assert float(found[0]["tokens_per_second_per_gpu"]) == 1e4
    assert (tmp_path / "experiments/exp/index.csv").exists()


def test_a_trunk_its_branches_and_a_trunk_that_diverges(tmp_path: Path) -> None:
    rungs = {"a": {"model": {"width": 16}}, "b": {"model": {"width": 32}}}
    sections = {"rungs": rungs, "tokens": [640, 1280, 2560], "trunk": {"decay": 0.25}}
    script = {"b-2.56kt": ["diverged"]}
    faked = Faked(tmp_path, script, experiment={"kind": "ladder"}, **sections, launch={"discard": True})
    told = re.findall(r"(done|diverged) +(\S+)-\w{10}", faked.sweep("launch", code=1).stderr)
    budgets = ("1.28kt", "2.56kt", "640t")
    assert sorted(told) == [("diverged", f"b-{each}") for each in budgets] + [("done", f"a-{each}") for each in budgets]
    assert faked.journal()[:6] == [(w, f"a-{b}") for b in ("2.56kt", "640t", "1.28kt") for w in ("start", "end")]
    assert set(faked.states().values()) == {"done", "diverged"}
    assert all(status["state"] == "diverged" for slug, status in faked.statuses().items() if slug.startswith("b"))
    branch = next((tmp_path / "experiments/exp/runs").glob("a-640t-*"))
    first = json.loads((branch / "metrics.jsonl").read_text().splitlines()[1])
    assert first["step"] == 16
    assert not (branch / "checkpoints").exists()

    faked.script({})
    faked.sweep("launch", "--only", "diverged")
    assert set(faked.states().values()) == {"done"}
    assert faked.run_again() == []


def test_two_launchers_and_one_that_is_killed(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {"seconds": 0.1}, grid={"optim.lr": RATES[:4]}, launch={"parallel": 2})
    launchers = [
        subprocess.Popen(faked.command("launch"), cwd=tmp_path, env=faked.environment, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    try:
        _until(lambda: len(faked.starts()) >= 2)
        launchers[0].kill()
        assert launchers[1].wait(100) in (0, 1)
    finally:
        for each in launchers:
            each.kill()
    faked.sweep("launch")
    assert set(faked.states().values()) == {"done"}
    assert faked.run_again() == []
    assert (tmp_path / "journal").read_text().count("end ") == 4


def test_two_launchers_under_slurm_submit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits in sbatch; the second one would have seen the same planned runs. GPUs get cores."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    wait = "for _ in $(seq 600); do [ -e go ] && break; sleep 0.1; done"
    for name, text in (("sbatch", f"echo x >>submitted; {wait}; echo 7"), ("squeue", "exit 0"), ("sacct", "exit 1")):
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    launch = {"kind": "slurm", "parallel": 2, "max_gpu_hours": 100, "flops_per_second": 1e9, "gpus_per_node": 1}
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:2]}, launch=launch)
    with subprocess.Popen(faked.command("launch"), cwd=tmp_path, env=os.environ, stdout=subprocess.PIPE) as first:
        try:
            _until(lambda: (tmp_path / "submitted").exists())
            told = faked.sweep("launch", code=2).stderr
            assert "another megalite-sweep launch submits runs of this experiment" in told
            (tmp_path / "go").touch()
            assert first.wait(60) == 0
        finally:
            first.kill()
    assert (tmp_path / "submitted").read_text() == "x\n"
    script = (tmp_path / "experiments/exp/launches/001.sbatch").read_text()
    assert "#SBATCH --cpus-per-task=8" in script
    faked.sweep("launch")  # it is free again; what Slurm does not know any more is planned anew
    assert (tmp_path / "submitted").read_text() == "x\nx\n"


def test_ctrl_c_has_runs_save_and_a_second_one_kills(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {"seconds": 1.0}, grid={"optim.lr": RATES[:3]}, launch={"parallel": 2})
    launcher = subprocess.Popen(faked.command("launch"), cwd=tmp_path, env=faked.environment, stderr=subprocess.PIPE)
    _until(lambda: len(list((tmp_path / "experiments").glob("exp/runs/*/metrics.jsonl"))) >= 2)
    launcher.send_signal(signal.SIGINT)
    _, told = launcher.communicate(timeout=100)
    assert launcher.returncode == 3
    assert b"runs save and end; once more kills them" in told
    states = faked.statuses().values()
    assert {status["state"] for status in states} == {"planned"}
    assert sum("goes on from there" in status["reason"] for status in states) == 2

    faked.script({"": ["hang"]})
    ignoring = faked.megalite.read_text().replace("exec ", "trap '' TERM INT; exec ")
    faked.megalite.write_text(ignoring)
    launcher = subprocess.Popen(faked.command("launch"), cwd=tmp_path, env=faked.environment, stderr=subprocess.PIPE)
    _until(lambda: sum(faked.starts().values()) >= 4)
    launcher.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 3
    assert not _alive(tmp_path)
    faked.script({})
    faked.sweep("launch")
    assert set(faked.states().values()) == {"done"}


def test_a_budget_is_kept(tmp_path: Path) -> None:
    launch = {"max_gpu_hours": 0.001, "startup": 0}
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:3]}, launch=launch)
    assert "nothing tells how long a step takes" in faked.sweep("launch", code=2).stderr
    slow = {**launch, "flops_per_second": 1e3}
    faked.write(grid={"optim.lr": RATES[:3]}, launch=slow)
    told = faked.sweep("launch", code=2).stderr
    assert "launch.max_gpu_hours = 0.001: these 3 runs take" in told
    assert faked.starts() == {}
    assert not (tmp_path / "experiments").exists()
    faked.write(grid={"optim.lr": RATES[:3]}, launch={**slow, "flops_per_second": 1e12})
    assert "GPU-hours" in faked.sweep("cost").stdout
    faked.sweep("launch", "--dry-run")
    assert faked.starts() == {}
    faked.sweep("launch")
    assert sum(faked.starts().values()) == 3
    faked.write(grid={"optim.lr": RATES[:4]}, launch={"max_gpu_hours": 1e-9, "flops_per_second": 1e12, "startup": 0})
    assert "being spent" in faked.sweep("launch", code=2).stderr
    faked.write(grid={"optim.lr": RATES[:4]}, launch={"kind": "slurm"})
    assert "launch.max_gpu_hours: is needed on a cluster" in faked.sweep("launch", code=2).stderr


def test_the_cost_of_a_run_is_told_from_those_that_were_measured(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:1]})
    faked.sweep("launch")
    faked.write(grid={"optim.lr": RATES[:2], "model.width": [16, 32]})
    told = faked.sweep("cost").stdout
    assert "measured on other sizes" in told
    line = next(line for line in told.splitlines() if line.startswith("width16-lr0.02"))
    assert line.split()[-1] == "measured"
    assert f" {lasting(faked.statuses()['lr0.01']['seconds'])} " in line  # with the start-up of the first


def test_successive_halving(tmp_path: Path) -> None:
    halving = {"steps": [3, 6, 12], "factor": 2, "metric": "loss_train"}
    sections = {"grid": {"optim.lr": RATES[:5]}, "halving": halving, "set": {"schedule.name": "constant"}}
    faked = Faked(tmp_path, {"lr0.02-r0": ["diverged"]}, **sections, launch={"parallel": 2})
    faked.script({"lr0.01-r0": ["diverged"]})
    faked.sweep("launch", code=1)
    done = {slug for slug, state in faked.states().items() if state == "done"}
    assert done == {"lr0.02-r0", "lr0.03-r0", "lr0.04-r0", "lr0.05-r0"} | {
        "lr0.02-r1", "lr0.03-r1", "lr0.04-r1", "lr0.02-r2", "lr0.03-r2",
    }  # fmt: skip
    run = next((tmp_path / "experiments/exp/runs").glob("lr0.02-r2-*"))
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert first["step"] == 7  # it goes on from the round before
    assert "nothing to start" in faked.sweep("launch", code=1).stdout


@pytest.mark.parametrize("damage", ["", "{", '{"id": 3}', "[]"])
def test_a_status_that_is_damaged_is_made_anew(damage: str, tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:1]})
    faked.sweep("launch")
    path = next((tmp_path / "experiments/exp/runs").glob("*/status.json"))
    path.write_text(damage)
    assert "1 done" in faked.sweep("status").stdout
    assert "nothing to start" in faked.sweep("launch").stdout
    assert sum(faked.starts().values()) == 1


def test_what_stands_in_a_run_folder_is_not_trusted(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:1]}, launch={"parallel": 10**20})
    faked.sweep("launch")
    run = next((tmp_path / "experiments/exp/runs").iterdir())
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "reason": "\x1b[31m[/bold]", "job": "\x1b[2J[/bold]"}))
    assert "\x1b" not in faked.sweep("status").stdout
    nothing = dict.fromkeys(("loss", "tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu"), float("nan"))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 10, **nothing}) + "\n")
    assert "1 row" in faked.sweep("collect").stdout
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "1 planned" in faked.sweep("status").stdout


def test_the_cost_tells_what_does_not_fit(tmp_path: Path) -> None:
    sizes = [1024, 1 << 22]
    faked = Faked(
        tmp_path, {}, grid={"model.vocab_size": sizes}, set={"model.width": 4096}, launch={"cluster": "h100_sxm"}
    )
    told = faked.sweep("cost").stdout
    assert told.count("does not fit into memory") == 1


def test_a_run_is_found_by_its_id_whatever_its_name(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:2]})
    faked.sweep("launch")
    faked.write(grid={"optim.lr": RATES[:2], "optim.weight_decay": [0.1]})  # the default, but in the names now
    told = faked.sweep("launch").stdout
    assert "nothing to start" in told
    faked.write(grid={"optim.lr": RATES[1:3]})
    assert "1 run in the folder are no longer part" in faked.sweep("status").stdout.replace(
        "is no longer", "are no longer"
    )
    assert "1 run" in faked.sweep("launch").stdout


def test_the_folder_of_an_experiment_stands_for_its_file(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:2]})
    faked.sweep("launch")
    words = faked.command("status")
    words[words.index("exp.yaml")] = "experiments/exp"
    done = subprocess.run(words, cwd=tmp_path, env=faked.environment, capture_output=True, text=True, timeout=100)
    assert "2 runs: 2 done" in done.stdout, done.stderr


def test_runs_share_the_cores_and_not_the_gpus(tmp_path: Path) -> None:
    faked = Faked(tmp_path, {}, grid={"optim.lr": RATES[:1]}, launch={"cores": 10_000})
    assert "launch.cores = 10000: this process may use" in faked.sweep("launch", code=2).stderr
    assert BASE["run"] == {"device": "cpu"}


def _until(done: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not (callable(done) and done()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(folder: Path) -> list[str]:
    """Command lines of processes that were started in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder and int(entry.name) != os.getpid():
                found.append((entry / "cmdline").read_text())
    return found
