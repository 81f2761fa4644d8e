"""What the launcher, the supervisor and the ranks tell each other through files of the run folder."""

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megalite.base.exit_codes import ExitCode
from megalite_launch.base import outcome
from megalite_launch.base.events import append_event, read_events
from megalite_launch.base.outcome import Failure, read_failures, read_outcome, write_failure, write_outcome
from megalite_launch.base.run_folder import Attempt, RunFolder

LAUNCH = Path(__file__).parents[2] / "launch"
SOURCES = sorted(LAUNCH.rglob("*.py"))


def test_the_exit_codes_are_those_of_megalite() -> None:
    names = ("DONE", "FAILED", "BAD_INPUT", "STOPPED", "UNHEALTHY", "LOST_CONTACT", "INTERRUPTED")
    assert {name: getattr(outcome, name) for name in names} == {name: ExitCode[name] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_sources_are_python_3_9(path: Path) -> None:
    assert isinstance(ast.parse(path.read_text(), feature_version=(3, 9)), ast.Module)  # else a SyntaxError


def test_nothing_but_the_standard_library_is_imported() -> None:
    paths = [path.relative_to(LAUNCH).with_suffix("") for path in SOURCES]
    modules = [".".join(("megalite_launch", *path.parts)).removesuffix(".__init__") for path in paths]
    code = f"""
import sys
before = set(sys.modules)  # an editable installation has its own finder
for name in {modules}:
    __import__(name)
found = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(found - sys.stdlib_module_names - {{"megalite_launch"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["4711.0.2", "local-20260101T000000.3.0", "1_2.0.0"])
def test_names_of_attempts(name: str) -> None:
    attempt = Attempt.parse(name)
    assert attempt is not None
    assert str(attempt) == name


@pytest.mark.parametrize("name", ["", "4711", "4711.0", "4711.0.x", "../a.0.0", "4711.0.2.3"])
def test_other_names_are_of_no_attempt(name: str) -> None:
    assert Attempt.parse(name) is None


def test_the_newest_checkpoint_is_found_by_its_name(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.newest_step() == 0
    for name in ("step-00000009", "step-00000010", "step-00000099.partial", "step-x", "other"):
        (run.checkpoints / name).mkdir(parents=True)
    assert run.newest_step() == 10


def test_events_of_many_writers_are_all_whole(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    writers = [
        threading.Thread(target=lambda by=by: [append_event(path, "tick", by, f"{by} {i}", i=i) for i in range(50)])
        for by in "abcd"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    found = read_events(path)
    assert {by: [event["i"] for event in found if event["by"] == by] for by in "abcd"} == {
        by: list(range(50)) for by in "abcd"
    }


def test_a_half_written_event_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    append_event(path, "begin", "supervisor", "began")
    path.write_bytes(path.read_bytes() + b'{"time": 1, "ev')
    append_event(path, "end", "supervisor", "ended", code=0)
    assert [event["event"] for event in read_events(path)] == ["begin", "end"]


@pytest.mark.parametrize("line", ["null", "[1]", '{"event": "x"}', '{"time": "1", "event": "x"}', "[" * 10**5, "\x00"])
def test_a_line_that_is_no_event_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    append_event(path, "end", "supervisor", "ended")
    assert [event["event"] for event in read_events(path)] == ["end"]


def test_causes_come_before_what_follows_from_them(tmp_path: Path) -> None:
    early, cause = Failure(1.0, 3, "n1", 5, 7, "lost a peer"), Failure(2.0, 1, "n2", 1, 7, "a bug")
    for failure in (early, cause, Failure(0.5, 1, "n2", 5, 7, "later words of the same rank")):
        write_failure(tmp_path, failure)
    (tmp_path / "fail-00009.json").write_text('{"time": 0, "rank": "x"}')
    (tmp_path / "fail-00008.json").write_text("{")
    assert read_failures(tmp_path) == [cause, early]


def test_a_later_report_of_a_rank_may_only_add_words(tmp_path: Path) -> None:
    first = Failure(1.0, 3, "n1", 5, 7, "lost a peer")
    for failure in (first, Failure(2.0, 3, "n1", 5, 9, "rank 4 is gone"), Failure(3.0, 3, "n1", 5, 9, "")):
        write_failure(tmp_path, failure)
    assert read_failures(tmp_path) == [Failure(1.0, 3, "n1", 5, 7, "rank 4 is gone")]


def test_the_outcome_of_an_attempt(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None
    write_outcome(tmp_path, 3, 12)
    found = read_outcome(tmp_path)
    assert found is not None
    assert (found.code, found.step) == (3, 12)
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.json"]
    (tmp_path / "outcome.json").write_text(json.dumps({"time": 0.0, "code": "3", "step": 1}))
    assert read_outcome(tmp_path) is None
