"""`megalite-logs`: the first failure of an attempt on one screen, whatever ranks have printed."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_run import MadeUp, made_up

from megalite_launch import commands
from megalite_launch.base.outcome import Failure, write_failure
from megalite_launch.base.run_folder import Attempt
from megalite_launch.base.texts import escaped
from megalite_launch.watch import logs
from megalite_launch.watch.logs import followed, log_of, tail_of


@pytest.fixture
def run(tmp_path: Path) -> MadeUp:
    made = made_up(tmp_path / "run")
    for name in ("4711.0.0", "4711.0.1", "4711.1.0"):
        attempt = Attempt.parse(name)
        assert attempt is not None
        folder = made.run.logs(attempt)
        folder.mkdir(parents=True)
        for rank in (0, 9, 19):
            (folder / f"n002-{rank}.log").write_text("\n".join(f"{name} rank {rank} line {at}" for at in range(100)))
    return made


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert commands.run("logs", list(arguments)) == 0
    return capsys.readouterr().out


def test_the_latest_failure_in_context(run: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, str(run.run.path))
    for words in (
        "attempt 4711.0.1 began", "on n001, n002",
        " after 1 s: hang, exit code 5; saved up to step 700\n",
        "first to fail: rank 9 on n002", "in step 711, exit code 5", "no answer to the roll call",
        "rank 9 on n002 is 1.23 times slower", "4711.0.1 rank 9 line 99", "others: 3 reported a failure",
        "ranks 0, 1, 2 on n001, code 5, +1.0 s: lost rank 9",
    ):  # fmt: skip
        assert words in text
    assert "line 84" not in text
    assert text.count("hang") == text.count("first to fail") == 1  # what has ended it is told once
    assert len(text.splitlines()) < 40


def test_another_attempt_rank_and_more_lines(run: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run.run.path)
    first = told(capsys, path, "--attempt", "4711.0.0")
    assert "illegal memory access" in first
    assert "1.23 times slower" not in first
    assert "4711.0.0 rank 0 line 0" in told(capsys, path, "--attempt", "4711.0.0", "--rank", "0", "--lines", "200")
    assert "there is no log of rank 5" in told(capsys, path, "--rank", "5")
    going = told(capsys, path, "--attempt", "4711.1.0")
    assert "goes on, or nobody has told its end" in going
    assert "no rank has reported a failure" in going


def test_a_failure_that_no_rank_could_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 1)
    run.attempt("1.0.0", 20)
    first = {"rank": None, "node": "n002", "text": "Node failure on n002"}
    run.event("attempt_ended", "supervisor", "…", attempt="1.0.0", cause="killed", code=5, first=first)
    run.attempt("1.0.1", 20)
    text = told(capsys, str(tmp_path / "run"))
    assert text.startswith("attempt 1.0.0 began")
    assert "\nfirst to fail: n002: Node failure on n002; it could report nothing itself\n" in text


def test_a_rank_that_was_killed_is_first_and_not_those_that_missed_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeUp(tmp_path / "run")
    run.job(0, 1)
    run.attempt("1.0.0", 20)
    attempt = Attempt("1", 0, 0)
    run.run.attempt(attempt).mkdir(parents=True)
    write_failure(run.run.attempt(attempt), Failure(run.now, 0, "n001", 5, 21, "lost a peer: closed by peer"))
    run.run.logs(attempt).mkdir(parents=True)
    for rank in (0, 3):
        (run.run.logs(attempt) / f"n00{1 + rank // 2}-{rank}.log").write_text(f"rank {rank} was here\n")
    first = {"rank": 3, "node": "n002", "text": "Killed"}
    run.event("attempt_ended", "supervisor", "…", attempt="1.0.0", cause="killed", code=5, first=first)
    text = told(capsys, str(tmp_path / "run"))
    assert "first to fail: rank 3 on n002: Killed; it could report nothing itself\n" in text
    assert "rank 3 was here" in text
    assert "ranks: 1 reported a failure\n  rank 0 on n001, code 5: lost a peer: closed by peer" in text
    assert text.count("first to fail") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attempt", "4711.0.7"], "there is no such attempt; the latest are: 4711.0.0, 4711.0.1, 4711.1.0"),
        (["--attempt", "../x\x1b"], r"--attempt ../x\x1b: there is no such attempt"),
    ],
)
def test_bad_input(run: MadeUp, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("logs", [str(run.run.path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_a_supervisor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "logs/rank_0000.log").write_text("rank 0 was here\n")
    (tmp_path / "logs/rank_0010.log").write_text("not this one\n")
    text = told(capsys, str(tmp_path))
    assert "rank 0 was here" in text
    assert "not this one" not in text
    assert log_of(logs.RunFolder(tmp_path), None, 1) is None


@given(st.binary(max_size=5000))
def test_bytes_of_a_log_cannot_disturb_a_terminal(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "rank.log"
    path.write_bytes(text)
    lines = tail_of(path, 15)
    assert 0 < len(lines) <= 15
    assert all(len(line) <= 200 and line == escaped(line, kept="") for line in lines)


def test_a_huge_line_is_cut_and_a_bar_is_what_it_showed_last(tmp_path: Path) -> None:
    path = tmp_path / "rank.log"
    path.write_bytes(b"x" * 10**7 + b"\n10%\r20%\r30%\r\n\x1b[31mred\x1b[0m\n")
    huge, bar, red = tail_of(path, 15)
    assert (len(huge), bar, red) == (200, "30%", r"\x1b[31mred\x1b[0m")


def test_what_is_added_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, slept = tmp_path / "rank.log", threading.Event()
    path.write_text("before\n")
    lines = followed(path)
    texts = iter(["one\ntw", "o\n\x07three\n", None])

    def sleep(_: float) -> None:
        slept.set()
        text = next(texts)
        if text is None:
            path.write_text("cut\n")
        else:
            with path.open("a") as file:
                file.write(text)

    monkeypatch.setattr(logs.time, "sleep", sleep)
    assert [next(lines) for _ in range(4)] == ["one", "two", r"\x07three", "cut"]
    assert slept.is_set()
