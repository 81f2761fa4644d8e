"""A job without a supervisor: what machine 0 writes down, and the exit codes that end a job on Kubernetes."""

import sys
from pathlib import Path

import pytest

from megalite_launch.base.events import append_event, read_events
from megalite_launch.base.outcome import write_met
from megalite_launch.base.run_folder import ATTEMPT
from megalite_launch.commands import run
from megalite_launch.supervise.policy import STANDSTILL
from megalite_launch.watch.run import Watched
from megalite_launch.watch.summary import summary

CRASHES = """
import json, os, sys, time
attempt = os.environ["MEGALITE_ATTEMPT"]
report = {"time": time.time(), "rank": 3, "node": "m1", "code": CODE, "step": 7, "text": "CUDA error"}
open(attempt + "/fail-00003.json", "w").write(json.dumps(report))
sys.exit(5)
"""
WELL = """
import json, os, sys, time
report = {"time": time.time(), "code": CODE, "step": 9}
open(os.environ["MEGALITE_ATTEMPT"] + "/outcome.json", "w").write(json.dumps(report))
sys.exit(CODE)
"""


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)


def start(folder: Path, code: str, node: int = 0, job: str = "uid-1") -> int:
    options = ["--nodes", "2", "--node-rank", str(node), "--ranks", "2", "--master", "localhost"]
    return run("node", [*options, "--run", str(folder), "--job", job, "--", sys.executable, "-c", code])


def told(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder / "events.jsonl")]


def test_attempts_without_a_newer_checkpoint_end_the_job(tmp_path: Path) -> None:
    crash = CRASHES.replace("CODE", "1")
    assert [start(tmp_path, crash) for _ in range(2)] == [1, 1]
    saves = f"import os\nos.makedirs({str(tmp_path / 'checkpoints/step-00000004')!r})\n"
    assert start(tmp_path, saves + crash) == 1
    assert [start(tmp_path, crash) for _ in range(3)] == [1, 1, STANDSTILL]
    assert told(tmp_path)[:3] == ["begin", "attempt", "attempt_ended"]
    assert told(tmp_path)[-1] == "end"
    before = told(tmp_path)
    assert [start(tmp_path, crash, node) for node in (0, 1)] == [STANDSTILL, STANDSTILL]  # whoever comes late
    assert told(tmp_path) == before
    assert start(tmp_path, crash, job="uid-2") == 1  # submitted anew, it gets new attempts
    watched = Watched(tmp_path)
    watched.update()
    found = summary(watched)
    assert [each["cause"] for each in found["attempts"]] == ["crash"] * 7
    assert found["attempts"][0]["first"] == {"rank": 3, "node": "m1", "text": "CUDA error"}
    assert [node["node"] for node in found["nodes"]] == ["m1"]


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (4, 4), (130, 130)])
def test_what_does_not_get_better_ends_the_job_wherever_it_is_found(tmp_path: Path, code: int, expected: int) -> None:
    assert start(tmp_path / "0", CRASHES.replace("CODE", str(code))) == expected
    assert told(tmp_path / "0")[-1] == "end"
    assert start(tmp_path / "1", f"raise SystemExit({code})", node=1) == expected
    assert told(tmp_path / "1") == ["end"]
    assert start(tmp_path / "1", "raise SystemExit(5)") == expected


def test_a_machine_that_is_started_when_all_is_done_is_done(tmp_path: Path) -> None:
    assert start(tmp_path, WELL.replace("CODE", "0")) == 0
    assert start(tmp_path, "raise SystemExit(1)", node=1) == 0
    assert read_events(tmp_path / "events.jsonl")[-1]["code"] == 0
    assert "finished: training is done" in (tmp_path / "status.html").read_text()


def test_a_stop_is_no_end(tmp_path: Path) -> None:
    assert start(tmp_path, WELL.replace("CODE", "3")) == 3
    assert told(tmp_path) == ["begin", "attempt", "attempt_ended", "requeue"]
    assert start(tmp_path, WELL.replace("CODE", "0")) == 0


def test_an_attempt_whose_machine_was_killed_counts_too(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"attempts/uid-1.0.{number}").mkdir(parents=True)
        write_met(tmp_path / f"attempts/uid-1.0.{number}")
        append_event(tmp_path / "events.jsonl", "attempt", "node", "", job="uid-1", attempt=f"uid-1.0.{number}", step=0)
        if number < 2:
            append_event(tmp_path / "events.jsonl", "attempt_ended", "node", "", job="uid-1", from_step=0, to_step=0)
    assert start(tmp_path, "raise SystemExit(0)") == STANDSTILL
    killed, ended = read_events(tmp_path / "events.jsonl")[-2:]
    assert (killed["event"], killed["attempt"], killed["cause"]) == ("attempt_ended", "uid-1.0.2", "killed")
    assert ended["reason"] == "3 attempts in a row have saved no newer checkpoint"


def test_a_run_folder_that_cannot_be_written_is_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attempts").write_text("")
    assert start(tmp_path, "raise SystemExit(0)") == 1
    assert "attempts" in capsys.readouterr().err
    assert "end" not in told(tmp_path)


def test_a_program_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    options = ["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "a", "--run", str(tmp_path)]
    assert run("node", [*options, "--job", "j", "--", "no-such-program"]) == 2
    assert told(tmp_path)[-1] == "end"
    with pytest.raises(SystemExit):
        run("node", [*options, "--job", "../x", "--", "true"])


MET = 'import os; open(os.environ["MEGALITE_ATTEMPT"] + "/met", "w")\n'


def test_a_pod_that_stays_pending_does_not_end_the_job(tmp_path: Path) -> None:
    """The ranks of machine 0 wait for the others, and end with 5, which Kubernetes counts by itself."""
    assert [start(tmp_path, "raise SystemExit(5)") for _ in range(5)] == [5] * 5
    assert [event["met"] for event in read_events(tmp_path / "events.jsonl") if "met" in event] == [False] * 5
    append_event(tmp_path / "events.jsonl", "attempt", "node", "", job="uid-1", attempt="uid-1.0.5", step=0)
    assert start(tmp_path, "raise SystemExit(5)") == 5  # machine 0 was killed while it waited
    assert [start(tmp_path, MET + "raise SystemExit(5)") for _ in range(3)] == [5, 5, STANDSTILL]


def test_a_file_that_is_away_ends_only_a_job_that_has_not_trained(tmp_path: Path) -> None:
    assert start(tmp_path, MET + "raise SystemExit(1)") == 1
    assert [start(tmp_path, "raise SystemExit(2)", node) for node in (0, 1, 0, 0, 0)] == [5] * 5
    assert told(tmp_path).count("waiting") == 4
    assert "end" not in told(tmp_path)
    assert start(tmp_path, WELL.replace("CODE", "0")) == 0
    assert start(tmp_path / "other", "raise SystemExit(2)") == 2


def test_a_file_that_stays_away_ends_the_job(tmp_path: Path) -> None:
    assert start(tmp_path, MET + "raise SystemExit(1)") == 1
    for _ in range(12):
        append_event(tmp_path / "events.jsonl", "waiting", "node", "", job="uid-1")
    assert start(tmp_path, "raise SystemExit(2)") == 2
    assert told(tmp_path)[-1] == "end"
