"""Which cases are started, when, and what becomes of their rows; without a process, but for those that are killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.base.errors import InputError
from megalite_tools.bench.training.cases import Case, Target
from megalite_tools.bench.training.guard import ProgramEnd, ProgramLimits
from megalite_tools.bench.training.parent import ENDING_SECONDS, CaseRunner, Machine, locked
from megalite_tools.bench.training.rows import Rows

CPU = Target("cpu", True)
TINY = ("model.layers=1", "model.width=32", "model.ffn=48", "model.vocab_size=64", "model.sequence_length=16")
MEASURED = {"loss": [3.0, 2.0], "step_ms": {"median": 5.0, "p10": 4.0, "p90": 6.0}, "tok_s": 10.0}
Answer = Callable[[str, Rows], ProgramEnd]


def case(name: str, **more: Any) -> Case:
    return Case(name, implementation="megalite", model="m", **{"inputs": TINY, **more})


def ended(code: int = 0, broken: str = "", tail: str = "") -> ProgramEnd:
    return ProgramEnd(code, broken, 1.0, tail, 0)


def ok(name: str, rows: Rows) -> ProgramEnd:
    rows.write(name, {"id": name, "status": "ok", **MEASURED})
    return ended()


class Bench:
    """A runner whose cases take time on a clock that only they move."""

    def __init__(self, folder: Path, answer: Answer, seconds: float = 1000, gpus: int | None = None) -> None:
        self.now, self.lasts, self.ran, self.said = 0.0, 10.0, [], []  # type: ignore[var-annotated]

        def started(command: Sequence[str], _: Mapping[str, str], limits: ProgramLimits, *files: Path) -> ProgramEnd:
            name = command[command.index("--case") + 1] if "--case" in command else command[0]
            self.ran.append(name)
            self.now += min(self.lasts, limits.seconds)
            return answer(name, Rows(folder / "rows"))

        machine = Machine(CPU, gpus)
        self.runner = CaseRunner(
            folder, Path("plan"), machine, "c0", lambda: seconds - self.now, self.said.append, started=started
        )

    @property
    def rows(self) -> dict[str, Any]:
        """The rows on disk, which are those in memory."""
        found = Rows(self.runner.folder / "rows").read()
        assert found == self.runner.rows
        return found


def test_rows_are_written_and_not_made_again(tmp_path: Path) -> None:
    cases = [case("a"), case("b")]
    bench = Bench(tmp_path, ok)
    assert bench.runner.run(cases) == []
    assert bench.ran == ["a", "b"]
    assert {row["status"] for row in bench.rows.values()} == {"ok"}
    assert {"label", "hash", "commit", "group", "seconds", "written", "predicted"} <= bench.rows["a"].keys()
    bench.ran.clear()
    bench.runner.run(cases)
    assert bench.ran == []
    bench.runner.again = frozenset({"b"})
    bench.runner.run(cases)
    assert bench.ran == ["b"]


def test_rows_of_another_commit_or_case_are_made_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ok)
    bench.runner.run([case("a"), case("b")])
    bench.runner.run([case("a", limit=99, value=7), case("b", inputs=(*TINY, "batch.micro=2"))])
    assert bench.ran == ["a", "b", "b"], "limits and values do not change what is measured"
    bench.runner.commit = "c1"
    bench.runner.run([case("a")])
    assert bench.ran[3:] == ["a"]


def test_a_case_that_does_not_fit_is_not_started_and_a_shorter_one_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ok, seconds=100)
    late = bench.runner.run([case("a", limit=60), case("b", limit=85), case("c", limit=20), case("d", limit=71)])
    assert bench.ran == ["a", "c"]
    assert late == ["b", "d"]
    assert bench.rows.keys() == {"a", "c"}
    exact = Bench(tmp_path / "exact", ok, seconds=60 + ENDING_SECONDS)
    assert exact.runner.run([case("a", limit=60)]) == []


@pytest.mark.parametrize("how", [ended(1), ended(-signal.SIGSEGV), ended(-signal.SIGINT, "time")])
def test_an_implementation_is_given_up_after_two_failures_in_a_row(tmp_path: Path, how: ProgramEnd) -> None:
    def answer(name: str, rows: Rows) -> ProgramEnd:
        return how if name.startswith("bad") else ok(name, rows)

    compiled = (*TINY, "train.compile=true")
    cases = [case("bad1"), case("good"), case("bad2"), case("bad3"), case("other", inputs=compiled), case("late")]
    bench = Bench(tmp_path, answer)
    bench.runner.run(cases)
    assert bench.ran == ["bad1", "good", "bad2", "bad3", "other"], "a success between them counts"
    assert bench.rows["late"]["status"] == "refused"
    assert "bad2, bad3" in bench.rows["late"]["reason"]
    bench.ran.clear()
    bench.runner.again = frozenset({"bad3", "late"})
    bench.runner.run(cases)
    assert "late" not in bench.ran
    bench.runner.commit = "fixed"
    bench.runner.run([case("late")])
    assert bench.ran[-1] == "late", "a refusal is looked at again, and failures of another commit do not count"


def test_sizes_that_do_not_fit_memory_do_not_give_an_implementation_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda name, _: ended(1, tail="torch.OutOfMemoryError: CUDA out of memory"))
    bench.runner.run([case("a"), case("b"), case("c")])
    assert bench.ran == ["a", "b", "c"]
    assert {row["status"] for row in bench.rows.values()} == {"oom"}


@pytest.mark.parametrize(
    ("written", "how", "status", "reason"),
    [
        ("", ended(-signal.SIGABRT), "crash", "killed by SIGABRT, while building"),
        ("", ended(-signal.SIGKILL), "oom", "killed, as the system does when host memory runs out, while building"),
        ("", ended(-signal.SIGKILL, "time"), "timeout", "took longer than its limit, while building"),
        ("", ended(-signal.SIGKILL, "memory"), "oom", "took more host memory than its limit, while building"),
        ("", ended(0), "crash", "ended without a row, while building"),
        ('{"id": "a", "status": "o', ended(0), "crash", "ended without a row, while building"),
        ('{"id": "a", "status": "great"}', ended(0), "crash", "ended without a row, while building"),
        ("[" * 100_000, ended(0), "crash", "ended without a row, while building"),
        ('{"status": "oom", "reason": "out of memory"}', ended(0), "oom", "out of memory"),
        ('{"status": "refused", "reason": "no"}', ended(0), "refused", "no"),
    ],
)
def test_whatever_a_case_leaves_becomes_a_row(
    tmp_path: Path, written: str, how: ProgramEnd, status: str, reason: str
) -> None:
    def answer(name: str, rows: Rows) -> ProgramEnd:
        rows.note(name, {"status": "crash", "stage": "building", "device": "d"})
        if written:
            (rows.folder / f"{name}.json").write_text(written)
        return how

    bench = Bench(tmp_path, answer)
    bench.runner.run([case("a")])
    row = bench.rows["a"]
    assert (row["status"], row["reason"]) == (status, reason)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["a.json"]


def test_what_was_measured_before_a_crash_is_kept(tmp_path: Path) -> None:
    def answer(name: str, rows: Rows) -> ProgramEnd:
        rows.note(name, {"status": "ok", "stage": "profiling", **MEASURED})
        return ended(-signal.SIGSEGV)

    bench = Bench(tmp_path, answer)
    bench.runner.run([case("a")])
    assert bench.rows["a"]["status"] == "ok"
    assert bench.rows["a"]["note"] == "then: killed by SIGSEGV"
    assert bench.rows["a"]["step_ms"] == MEASURED["step_ms"]


def test_losses_that_disagree_change_the_status_of_rows_that_are_there(tmp_path: Path) -> None:
    def answer(name: str, rows: Rows) -> ProgramEnd:
        loss = [3.0, 2.0] if name == "ours" else [3.1, 2.0]
        rows.write(name, {"id": name, "status": "ok", **MEASURED, "loss": loss})
        return ended()

    peer = Case("peer", implementation="transformers", model="m", inputs=TINY)
    bench = Bench(tmp_path, answer)
    bench.runner.run([peer, case("ours")])
    assert bench.rows["ours"]["status"] == "ok"
    assert bench.rows["peer"]["status"] == "disagrees"
    assert bench.rows["peer"]["reason"] == "the loss of step 1 is 3.1000, not the 3.0000 of ours"


def test_programs_have_rows_too(tmp_path: Path) -> None:
    codes = {"fine": 0, "fails": 3, "aborts": -6}
    bench = Bench(tmp_path, lambda name, _: ended(codes[name]))
    (tmp_path / "tests.xml").write_text('<testsuites><testsuite><testcase name="t"/></testsuite></testsuites>')
    programs = [Case(name, command=(name,), keep=("tests.xml",) * (name == "fails")) for name in codes]
    bench.runner.run(programs)
    assert [bench.rows[name]["status"] for name in codes] == ["ok", "failed", "crash"]
    assert bench.rows["fails"]["tests"] == {"passed": 1}
    assert bench.rows["fails"]["reason"] == "exit code 3"


def test_cases_for_more_gpus_than_there_are_cost_no_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ok, gpus=1)
    bench.runner.machine = Machine(CPU, 1)
    bench.runner.run([case("two", ranks=2, inputs=(*TINY, "batch.global=8")), Case("x", command=("x",), ranks=2)])
    assert bench.ran == []
    assert [row["reason"] for row in bench.rows.values()] == ["needs 2 GPUs, and there are 1"] * 2


def test_a_row_that_cannot_be_written_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, lambda name, _: ended(0))

    def write(self: Rows, name: str, row: Mapping[str, Any]) -> None:
        raise InputError(f"{name}: cannot be written: No space left on device")

    monkeypatch.setattr(Rows, "write", write)
    bench.runner.run([case("a"), case("b")])
    assert bench.ran == ["a", "b"]
    assert sum("No space left" in line for line in bench.said) == 2
    assert bench.runner.rows.keys() == {"a", "b"}, "in memory, for the folder that keeps results"


def test_results_that_cannot_be_kept_do_not_stop_the_cases(tmp_path: Path) -> None:
    def changed(_: Mapping[str, Any]) -> None:
        raise InputError("table.md: is a link")

    bench = Bench(tmp_path, ok)
    bench.runner.changed = changed
    assert bench.runner.run([case("a"), case("b")]) == []
    assert bench.ran == ["a", "b"]
    assert "results cannot be kept: table.md: is a link" in bench.said


def test_a_row_stays_until_there_is_another(tmp_path: Path) -> None:
    """Neither an attempt that never ends nor a refusal takes it away."""
    bench = Bench(tmp_path, ok)
    bench.runner.run([case("a")])
    kept = bench.rows["a"]

    def killed(*_: object) -> ProgramEnd:
        assert Rows(tmp_path / "rows").read() == {"a": kept}
        raise KeyboardInterrupt

    bench.runner.again, bench.runner.started = frozenset({"a"}), killed
    with pytest.raises(KeyboardInterrupt):
        bench.runner.run([case("a")])
    assert bench.rows == {"a": kept}
    bench.runner.machine = Machine(CPU, 0)
    bench.runner.run([case("a")])
    assert bench.rows == {"a": kept}
    assert "needs 1 GPU, and there are 0" in bench.said[-1]


def test_what_cannot_be_started_has_no_row_and_is_tried_again(tmp_path: Path) -> None:
    def fails(*_: object) -> ProgramEnd:
        raise OSError(11, "Resource temporarily unavailable")

    bench = Bench(tmp_path, ok)
    bench.runner.started = fails
    assert bench.runner.run([case("a")]) == ["a"]
    assert bench.rows == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "x", "status": "ok", "step_ms": 3, "implementation": "liger"}',
        '{"id": "x", "status": "ok", "step_ms": {"median": 1}, "implementation": "megalite"}',
        '{"id": "x", "status": "ok", "tests": [1]}',
        '{"id": "x", "status": "ok", "written": "yesterday"}',
        '{"id": "x", "status": "ok", "group": "g", "loss": ["a"]}',
        '{"id": "y", "status": "ok"}',
        '{"id": "x", "status": "fine"}',
        '[]', "", "{",
    ],
)  # fmt: skip
def test_files_that_are_no_rows_disturb_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "x.json").write_text(text)
    bench = Bench(tmp_path, ok)
    bench.runner.run([case("a")])
    assert bench.runner.rows.keys() == {"a"}


@pytest.mark.parametrize("code", [40, 63])
def test_signals_without_a_name(tmp_path: Path, code: int) -> None:
    bench = Bench(tmp_path, lambda *_: ended(-code))
    bench.runner.run([case("a")])
    assert bench.rows["a"]["reason"] == f"killed by signal {code}"


@pytest.mark.parametrize(
    ("script", "files", "found"), [("echo 'GPU 0: x'; echo 'GPU 1: x'", 1, 2), ("exit 3", 2, 2), ("echo ?", 0, 0)]
)
def test_gpus_are_counted_without_nvidia_smi_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, files: int, found: int
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(Path, "glob", lambda *_: iter(range(files)))
    assert Machine.found(Target("cuda", False)).gpus == found
    assert Machine.found(CPU).gpus is None


def test_two_at_once_in_a_folder_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ok)
    with locked(tmp_path / "lock"), pytest.raises(InputError, match="another process runs cases there"):
        bench.runner.run([case("a")])
    assert bench.ran == []
    bench.runner.run([case("a")])
    assert bench.ran == ["a"]


WAITS = """
import os, pathlib, time
folder = pathlib.Path('{folder}')
if not (folder / 'go').exists():
    (folder / 'pid').write_text(str(os.getpid()))
    time.sleep(60)
"""
PLAN = {
    "cases": [
        {"id": "first", "value": 2, "command": ["python", "-S", "-c", "print('one')"]},
        {"id": "second", "value": 1, "command": ["python", "-S", "-c", WAITS]},
    ]
}


def test_a_killed_parent_leaves_nothing_running_and_goes_on(tmp_path: Path) -> None:
    plan, out, keep = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "keep"
    plan.write_text(json.dumps(PLAN))
    command = [sys.executable, "-m", "megalite_tools.bench.training.command", "run", "--plan", str(plan)]
    command += ["--out", str(out), "--keep", str(keep), "--device", "cpu", "--tiny", "--seconds", "100"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (out / "pid").exists() or not (out / "pid").read_text():
        assert time.monotonic() < end
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    kept = json.loads((keep / "rows.json").read_text())
    assert [row["id"] for row in kept["rows"]] == ["first"]
    child = int((out / "pid").read_text())
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end, "the case lives on"
        time.sleep(0.05)
    (out / "go").touch()
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0, again.stderr
    assert "first: has a row already" in again.stderr
    kept = json.loads((keep / "rows.json").read_text())
    assert [(row["id"], row["status"]) for row in kept["rows"]] == [("first", "ok"), ("second", "ok")]
    assert {path.name for path in keep.iterdir()} == {"rows.json", "table.md", "running.log"}
    assert sorted(path.name for path in (out / "rows").iterdir()) == ["first.json", "second.json"]


def test_a_parent_has_no_torch() -> None:
    code = "import sys, megalite_tools.bench.training.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
