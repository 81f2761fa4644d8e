"""`megalite-status`: what is told of a run whose folder is whole, half-written, huge, hostile or not there."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up_run import MadeUp, made_up

from megalite_launch import commands
from megalite_launch.base.events import append_event
from megalite_launch.base.line_files import MAX_LINE_BYTES, Tail
from megalite_launch.base.texts import escaped
from megalite_launch.status import status_command
from megalite_launch.watch.run import Watched
from megalite_launch.watch.summary import Summary, summary
from megalite_launch.watch.text import status_text

OLD = Path("/root/.pyenv/versions/3.9.18/bin/python")
PROGRAM = [sys.executable, "-c", "import sys; from megalite_launch.commands import status; sys.exit(status())"]


def seen(path: Path, now: float) -> Summary:
    run = Watched(path)
    run.update(now)
    return summary(run)


def adds_up(found: Summary) -> bool:
    return sum(found["accounts"].values()) == pytest.approx(found["wall"], abs=1e-6)


def test_a_run_that_has_failed_and_goes_on(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run")
    found = seen(tmp_path / "run", run.now + 1)
    assert (found["state"], found["step"], found["steps"], found["ranks"]) == ("running", 1200, 2000, 16)
    assert [each["cause"] for each in found["attempts"]] == ["crash", "hang", None]
    assert found["accounts"] == pytest.approx(
        {"training": 2401, "saving": 18, "evaluating": 24, "restarting": 162, "lost": 220, "waiting": 2400}, abs=1
    )
    assert adds_up(found)
    assert found["lost_steps"] == 40
    assert found["checkpoint"] == {
        "step": 1200, "age": pytest.approx(1), "bytes": 8e9, "save_seconds": 1.5, "write_seconds": 20.0,
        "under_way": None,
    }  # fmt: skip
    usual, effective = found["usual_step_seconds"], found["goodput_without_waiting"]
    assert found["eta"] == pytest.approx(800 * usual / effective)
    (node,) = found["nodes"]
    assert node == {"node": "n002", "first_failures": 2, "straggler": 1, "left_out": "twice"}
    assert (found["failures"], found["rank_hours"]) == (2, pytest.approx(16 * 2800 / 3600, rel=0.02))
    text = status_text(found)
    for words in ("1,200 of 2,000, 40 done again", "crash: rank 9 on n002: CUDA error", "first to fail 2 ×, slow 1 ×",
                  "requeued: only 1 healthy node", "step 1,200, 1 s ago, 8.00 GB", "attempts: 3"):  # fmt: skip
        assert words in text


def test_a_hang_is_told_by_its_cause_and_a_second_interrupt_is_a_stop(tmp_path: Path) -> None:
    first = {"rank": 0, "node": None, "text": "nothing moves\n  rank 1 gave no answer\n  a table"}
    events = tmp_path / "events.jsonl"
    append_event(events, "begin", "supervisor", "begins", job="a", nodes=["n1"])
    append_event(events, "attempt", "supervisor", "attempt", attempt="a.0.0", nodes=["n1"], ranks=2, step=0)
    append_event(events, "attempt_ended", "supervisor", "ended", attempt="a.0.0", cause="hang", code=5, first=first)
    append_event(events, "attempt", "nobody", "no attempt", attempt={})  # passed over
    found = seen(tmp_path, time.time())
    assert len(found["attempts"]) == 1
    assert found["text"] == "an attempt has ended, and what comes next is not told yet"
    assert "hang: rank 0: nothing moves; rank 1 gave no answer\n" in status_text(found)
    append_event(events, "end", "supervisor", "ends", code=130, reason="interrupted at once")
    assert seen(tmp_path, time.time())["text"] == "stopped: interrupted at once"


def test_what_is_read_bit_by_bit_is_what_is_read_at_once(tmp_path: Path) -> None:
    whole, growing = made_up(tmp_path / "whole"), tmp_path / "growing"
    growing.mkdir()
    lines = sorted(
        (json.loads(line)["time"], name, line + b"\n")
        for name in ("events.jsonl", "metrics.jsonl")
        for line in (tmp_path / "whole" / name).read_bytes().splitlines()
    )
    run, held = Watched(growing), {"events.jsonl": b"", "metrics.jsonl": b""}
    for at, (moment, name, line) in enumerate(lines):
        text = held[name] + line
        cut = len(text) if at % 7 else len(text) // 2  # now and then, half a line
        with (growing / name).open("ab") as file:
            file.write(text[:cut])
        held[name] = text[cut:]
        if at % 5 == 0:
            run.update(moment)
    for name, rest in held.items():
        with (growing / name).open("ab") as file:
            file.write(rest)
    run.update(whole.now)
    expected = seen(tmp_path / "whole", whole.now)
    for key in ("accounts", "step", "lost_steps", "nodes", "attempts", "state"):
        assert summary(run)[key] == expected[key], key


def test_saves_to_the_nodes_alone_stop_training_too(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run", save_every=1000)
    run.job(0, 60)
    run.attempt("1.0.0", 20)
    before = seen(tmp_path / "run", run.now)
    run.now += 3
    run.metric(20, event="saving_local", checkpoint=20, blocked=3.0)
    found = seen(tmp_path / "run", run.now)
    assert found["accounts"] == pytest.approx({**before["accounts"], "saving": 3.0})
    assert (found["state"], found["checkpoint"]) == ("running", before["checkpoint"])  # it is no shared one


@pytest.mark.parametrize(
    ("case", "state"),
    [
        ("queued", "waiting"), ("preflight", "starting"), ("steps", "running"), ("long ago", "silent"),
        ("saving", "saving"), ("not saved", "running"), ("crashed", "starting"), ("requeued", "waiting"),
        ("done", "finished"), ("gave up", "failed"), ("stopped", "stopped"),
    ],
)  # fmt: skip
def test_states(case: str, state: str, tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    run.event("submitted", "launcher", "submitted")
    if case != "queued":
        run.job(0, 60)
    if case not in ("queued", "preflight"):
        run.attempt("1.0.0", 20)
    after = 5.0
    if case == "long ago":
        after = 3600
    elif case in ("saving", "not saved"):
        run.metric(20, event="saving", checkpoint=20, blocked=0.1)
        if case == "not saved":
            run.metric(20, event="save_failed", checkpoint=20, error="the disk is full")
        after = 30
    elif case == "crashed":
        run.fails("1.0.0", "crash", 0, "n1", "a bug", 1)
    elif case == "requeued":
        run.event("requeue", "supervisor", "requeued")
        after = 10**6
    elif case in ("done", "gave up", "stopped"):
        run.event("end", "supervisor", "ended", code={"done": 0, "gave up": 1, "stopped": 3}[case], reason="why")
    found = seen(tmp_path / "run", run.now + after)
    assert found["state"] == state
    assert found["over"] == (case in ("done", "gave up", "stopped"))
    assert adds_up(found)
    status_text(found)


def test_a_run_without_a_supervisor(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    for step in range(1, 11):
        run.now += 2
        run.metric(step, loss=2.0, step_seconds=2.0, tokens_per_second=100.0)
    run.metric(10, event="saving", checkpoint=10, blocked=0.0)
    run.metric(10, event="saved", checkpoint=10, bytes=5, seconds=0.1)
    assert seen(tmp_path / "run", run.now)["state"] == "running"
    run.now += 1
    run.metric(10, event="failed", reason="ranks lost contact")
    found = seen(tmp_path / "run", run.now + 1000)
    assert (found["state"], found["text"]) == ("failed", "failed: ranks lost contact")
    assert found["accounts"] | {"training": 20, "lost": 1} == found["accounts"]
    assert found["wall"] == 21
    run.now += 100
    run.metric(10, event="resumed")
    run.metric(10, event="done")
    found = seen(tmp_path / "run", run.now)
    assert [each["cause"] for each in found["attempts"]] == ["failed", "finished"]
    assert found["state"] == "finished"


LINES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"time": st.floats() | st.just(1.79e9), "step": st.integers() | st.just(5)},
        optional={
            name: st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=9), st.lists(st.text(max_size=3)))
            for name in ("step_seconds", "loss", "valid_loss", "checkpoint", "blocked", "bytes", "seconds", "attempt",
                         "nodes", "node", "bad", "ok", "first", "cause", "code", "reason", "text", "by", "ranks")
        }
        | {"event": st.sampled_from(["attempt", "attempt_ended", "begin", "end", "resumed", "saving", "saved", "done",
                                     "preflight", "straggler", "left_out", "rollback", "failed", "requeue", "x"])},
    ).map(lambda value: json.dumps(value).encode()),
)  # fmt: skip


@settings(max_examples=100)
@given(events=st.lists(LINES, max_size=12), metrics=st.lists(LINES, max_size=12))
@example(events=[b'{"time": 1790000000.0, "event": "attempt", "text": "\\u00a00"}'], metrics=[])
def test_whatever_is_in_the_files_is_told(
    events: list[bytes], metrics: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    (path / "events.jsonl").write_bytes(b"\n".join(events))
    (path / "metrics.jsonl").write_bytes(b"\n".join(metrics) + b"\n")
    found = seen(path, 1.8e9)
    assert adds_up(found)
    json.dumps(found, allow_nan=False)
    shown = status_text(found)
    assert shown == escaped(shown, kept="\n")  # other blanks than the usual one disturb no terminal


@pytest.mark.parametrize("ahead", [30.0, 3e7], ids=["half a minute", "a year"])
def test_an_event_of_the_future_moves_next_to_nothing(tmp_path: Path, ahead: float) -> None:
    run, same = (made_up(tmp_path / name) for name in ("run", "same"))
    now = run.now + 1
    lines = run.run.events.read_text().splitlines()
    wrong = json.loads(lines[3])
    lines[3] = json.dumps(wrong | {"time": now + ahead})
    run.run.events.write_text("\n".join(lines) + "\n")
    expected, found = seen(same.run.path, now), seen(run.run.path, now)
    assert adds_up(found)
    assert found["attempts"][-1]["cause"] == expected["attempts"][-1]["cause"]
    if ahead > 60:
        assert found["accounts"] == pytest.approx(expected["accounts"], abs=60)
        assert seen(run.run.path, now + 1000)["accounts"] == pytest.approx(
            seen(same.run.path, now + 1000)["accounts"], abs=60
        )


def test_a_first_line_of_the_future_is_passed_over(tmp_path: Path) -> None:
    append_event(tmp_path / "run" / "events.jsonl", "begin", "supervisor", "begins", job="7")
    line = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    assert seen(tmp_path / "run", line["time"] - 3600)["state"] == "unknown"
    assert seen(tmp_path / "run", line["time"] - 30)["state"] == "starting"


def test_lines_that_are_too_long_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" + b"x" * (3 * MAX_LINE_BYTES) + b"\nb\nhalf")
    tail = Tail(path)
    assert list(tail.lines()) == [b"a", b"b"]
    assert list(tail.lines()) == []
    with path.open("ab") as file:
        file.write(b" a line\n")
    assert list(tail.lines()) == [b"half a line"]
    assert not tail.replaced()
    path.write_bytes(b"new\n")
    assert tail.replaced()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    (tmp_path / "metrics.jsonl").mkdir()
    assert seen(tmp_path, 1.8e9)["state"] == "unknown"


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run")
    watched = Watched(tmp_path / "run")
    watched.update(run.now)
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/events.jsonl").write_text("")
    watched.update(run.now)
    assert (summary(watched)["state"], summary(watched)["step"]) == ("unknown", 0)


@pytest.mark.timeout(60)  # half a second, if it is read once
def test_a_long_run_is_read_once(tmp_path: Path) -> None:
    """Time grows with the lines, and a second look reads only what is new."""
    lines, names = 50_000, ("grad_norm", "parameter_norm", "learning_rate", "data_wait_seconds", "tokens")
    rest = json.dumps({"loss": 2.5, "step_seconds": 30.0, "tokens_per_second": 130000.0} | dict.fromkeys(names, 0.1234))
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, lines + 1):
            file.write(f'{{"step": {step}, "time": {1.75e9 + 30 * step}, {rest[1:]}\n')
    run = Watched(tmp_path)
    run.update(1.75e9 + 30 * lines)
    found = summary(run)
    assert (found["step"], found["state"], found["wall"]) == (lines, "running", 30 * lines)
    assert found["accounts"]["training"] == 30 * lines
    with path.open("r+b") as file:  # what was read before is not looked at again
        file.write(b"\0" * (path.stat().st_size // 2))
    with path.open("a") as file:
        file.write(f'{{"step": {lines + 1}, "time": {1.75e9 + 30 * (lines + 1)}, {rest[1:]}\n')
    run.update(1.75e9 + 30 * (lines + 1))
    assert (summary(run)["step"], summary(run)["accounts"]["training"]) == (lines + 1, 30 * (lines + 1))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(tmp_path / "run")
    assert commands.run("status", [str(tmp_path / "run")]) == 0
    assert "where time went" in capsys.readouterr().out
    assert commands.run("status", [str(tmp_path / "run"), str(tmp_path / "run"), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found["step"] for found in told] == [1200, 1200]
    assert commands.run("status", [str(tmp_path / "run"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    for arguments, words in [
        (["nowhere"], "nowhere: is no folder; give the folder of a run"),
        ([str(tmp_path)], "has no events.jsonl and no metrics.jsonl"),
        (["a", "b", "--html", "x"], "a page shows one run"),
        ([str(tmp_path / "run"), "--html", "/nowhere/page.html"], "--html /nowhere/page.html: No such file"),
        (["\x1b[2J"], r"\x1b[2J: is no folder"),
    ]:
        assert commands.run("status", arguments) == 2
        assert words in capsys.readouterr().err


def ending(path: Path) -> MadeUp:
    run = MadeUp(path)
    run.job(0, 60)
    run.attempt("1.0.0", 20)
    run.now = time.time() - 1
    return run


def test_following_on_a_pipe_adds_lines_until_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = ending(tmp_path / "run"), []

    def sleep(_: float) -> None:
        looks.append(1)
        run.now = time.time()
        run.event("end", "supervisor", "all steps are done", code=0, reason="all done")

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    assert commands.run("status", [str(tmp_path / "run"), "--follow"]) == 0
    told = capsys.readouterr().out
    assert len(looks) == 1
    assert "\x1b" not in told
    assert [line for line in told.splitlines() if "all steps are done" in line] == ["supervisor: all steps are done"]
    assert "finished: all done" in told.splitlines()[-1]


def test_following_on_a_terminal_draws_in_place(tmp_path: Path) -> None:
    run = ending(tmp_path / "run")
    run.event("end", "supervisor", "done", code=0, reason="all done")
    ours, theirs = pty.openpty()
    with subprocess.Popen([*PROGRAM, str(tmp_path / "run"), "--follow"], stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        drawn = io.BytesIO()
        with suppress(OSError):  # Linux tells so that the other end was closed
            while chunk := os.read(ours, 4096):
                drawn.write(chunk)
        assert process.wait(30) == 0
    os.close(ours)
    assert drawn.getvalue().startswith(b"\x1b[H\x1b[J")
    assert b"finished: all done" in drawn.getvalue()


def test_a_narrow_terminal_wraps_what_it_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut line would lose how an attempt ended, which is its last column."""
    made = made_up(tmp_path / "run")
    monkeypatch.setattr(status_command.shutil, "get_terminal_size", lambda: os.terminal_size((60, 200)))
    found = seen(made.run.path, made.now + 1)
    status_command._Screen()([], [found])
    told = capsys.readouterr().out.removeprefix(status_command.CLEAR_SEQUENCE)
    assert max(map(len, told.splitlines())) <= 60
    assert "CUDA error: an illegal memory access was encountered" in " ".join(told.split())
    assert "".join(told.split()) == "".join(status_text(found).split())


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    made_up(tmp_path / "run")
    command = " ".join([f"'{word}'" for word in [*PROGRAM, str(tmp_path / "run"), "--follow", "--json"]])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 10; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.endswith("141\n")
    assert done.stderr == ""


@pytest.mark.skipif(not OLD.exists(), reason="needs Python 3.9")
def test_python_3_9_runs_the_programs(tmp_path: Path) -> None:
    made_up(tmp_path / "run")
    root = Path(__file__).parents[2]
    (tmp_path / "megalite_launch").symlink_to(root / "launch")
    code = "import sys; from megalite_launch import commands; sys.exit(getattr(commands, sys.argv.pop(1))())"
    run = str(tmp_path / "run")
    for arguments, words in [
        (["status", run], "where time went"),
        (["status", run, "--html", str(tmp_path / "page.html")], ""),
        (["logs", run], "first to fail: rank 9 on n002"),
        (["goodput", run], "advice: checkpoint.interval="),
        (["goodput", "simulate", "--gpus", "16384", "--save-seconds", "2"], "16,384"),
    ]:
        done = subprocess.run(
            [str(OLD), "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout


def test_the_end_of_a_second_job_is_not_that_of_the_first(tmp_path: Path) -> None:
    """Two were submitted in one second, both began, and the second could not get the lock of the run folder."""
    run = MadeUp(tmp_path / "run")
    for job in ("1", "2"):
        run.event("begin", "supervisor", "begins", job=job, restart=0, step=0)
    for job in ("1", "2"):
        run.event("attempt", "supervisor", "…", job=job, attempt=f"{job}.0.0", nodes=["n"], ranks=1, step=0)
    run.event("end", "supervisor", "ends", job="2", code=2, reason="bad input: another job trains in this folder")
    assert not seen(run.run.path, run.now + 1)["over"]
    run.event("end", "supervisor", "ends", job="1", code=0, reason="training is done")
    assert seen(run.run.path, run.now + 1)["over"]


def test_a_job_that_was_killed_without_a_word_does_not_hide_the_end_of_a_later_one(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    run.event("begin", "supervisor", "begins", job="1", restart=0, step=0)
    run.event("begin", "supervisor", "begins", job="2", restart=0, step=0)
    run.event("end", "supervisor", "ends", job="2", code=2, reason="bad input")
    assert seen(run.run.path, run.now + 1)["over"]


def test_an_attempt_began_where_ranks_say_and_not_at_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 1)
    run.attempt("1.0.0", 20)
    run.event("attempt", "supervisor", "…", attempt="1.0.1", nodes=["n1"], ranks=1, step=160)
    run.metric(140, event="resumed")
    assert [attempt["from_step"] for attempt in seen(run.run.path, run.now + 1)["attempts"]] == [0, 140]
