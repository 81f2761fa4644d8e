"""How an attempt has ended, from what its ranks have written and what srun has said."""

import pytest

from megalite_launch.base.outcome import Failure, Outcome
from megalite_launch.base.verdict import First, Seen, judge

NODES = ("n1", "n2")
KILLED = "srun: error: n2: task 3: Killed"
TERMINATED = ["srun: launch/slurm: _step_signal: Terminating StepId=7.0", "srun: error: n1: tasks 0-1: Terminated"]


def seen(code: int = 143, **more: object) -> Seen:
    return Seen(NODES, 2, code, **more)  # type: ignore[arg-type]


def failure(code: int, rank: int = 3, time: float = 1.0, text: str = "why") -> Failure:
    return Failure(time, rank, f"n{1 + rank // 2}", code, 9, text)


@pytest.mark.parametrize(
    ("code", "cause", "exit_code"),
    [
        (1, "crash", 1),
        (2, "bad_input", 2),
        (4, "unhealthy", 4),
        (137, "killed", 5),
        (-9, "killed", 5),
        (77, "crash", 1),
    ],
)
def test_the_rank_that_fails_first_says_why(code: int, cause: str, exit_code: int) -> None:
    ended = judge(seen(failures=[failure(code)], said=["srun: error: n1: task 0: Killed"]))
    assert (ended.cause, ended.code, ended.first) == (cause, exit_code, First(3, "n2", "why"))


@pytest.mark.parametrize(("code", "cause"), [(0, "finished"), (3, "stopped")])
def test_ranks_that_end_well_say_so(code: int, cause: str) -> None:
    ended = judge(seen(outcome=Outcome(5.0, code, 9), failures=[failure(1, time=6.0)]))
    assert (ended.cause, ended.code) == (cause, code)


def test_ranks_that_stop_because_another_has_failed_do_not_count() -> None:
    assert judge(seen(outcome=Outcome(5.0, 3, 9), failures=[failure(1)])).cause == "crash"
    assert judge(seen(outcome=Outcome(5.0, 0, 9), failures=[failure(1)])).cause == "finished"
    ended = judge(seen(outcome=Outcome(5.0, 3, 0), said=[KILLED, *TERMINATED]))  # srun ended the others as they began
    assert (ended.cause, ended.first) == ("killed", First(3, "n2", "Killed"))
    own = ["srun: error: n1: task 0: Exited with exit code 3", *TERMINATED]
    assert judge(seen(outcome=Outcome(5.0, 3, 9), said=own)).cause == "stopped"


def test_a_request_that_ends_a_rank_which_has_stopped_changes_nothing() -> None:
    late = ["srun: error: n1: task 1: User defined signal 1"]
    for out_of_time in (False, True):
        stopped = Outcome(5.0, 3, 9)
        found = judge(seen(outcome=stopped, said=late, asked=True, out_of_time=out_of_time))
        assert (found.cause, found.code) == ("stopped", 3)
    assert judge(seen(outcome=Outcome(5.0, 3, 9), said=late)).cause == "killed"


@pytest.mark.parametrize(
    ("line", "cause", "first"),
    [
        (KILLED, "killed", First(3, "n2", "Killed")),
        (
            "srun: error: n2: tasks 2-3: Segmentation fault (core dumped)",
            "killed",
            First(2, "n2", "Segmentation fault (core dumped)"),
        ),
        ("srun: error: Node failure on n2", "killed", First(None, "n2", "Node failure on n2")),
        ("srun: error: n2: task 3: Exited with exit code 1", "crash", First(3, "n2", "Exited with exit code 1")),
        ("srun: error: n2: task 3: Exited with exit code 2", "bad_input", First(3, "n2", "Exited with exit code 2")),
    ],
)
def test_srun_speaks_for_ranks_that_could_not(line: str, cause: str, first: First) -> None:
    ended = judge(seen(said=[line, *TERMINATED], failures=[failure(5, rank=0)]))
    assert (ended.cause, ended.first) == (cause, first)


def test_ranks_that_srun_has_ended_are_no_cause() -> None:
    ended = judge(seen(said=TERMINATED, failures=[failure(5, rank=0, text="lost a peer")]))
    assert (ended.cause, ended.code, ended.first) == ("lost_contact", 5, First(0, None, "lost a peer"))


def test_who_misses_a_peer_is_no_cause() -> None:
    said = ["srun: error: n1: task 0: Exited with exit code 5", *TERMINATED]
    ended = judge(seen(said=said, failures=[failure(5, rank=0, text="rank 3 is gone")]))
    assert (ended.cause, ended.first) == ("lost_contact", First(0, None, "rank 3 is gone"))


def test_the_node_whose_ranks_neither_tell_nor_end_is_suspected() -> None:
    said = ["srun: error: n1: tasks 0-1: Exited with exit code 5"]
    ended = judge(seen(-9, said=said, failures=[failure(5, rank=0, text="rank 2 gives no answer")], reaped="20 s"))
    assert (ended.cause, ended.first) == ("lost_contact", First(None, "n2", "rank 2 gives no answer"))
    both = judge(seen(-9, failures=[failure(5, rank=0)], reaped="20 s"))
    assert both.first == First(0, None, "why")  # ranks of both nodes are missing
    one = judge(seen(-9, failures=[failure(5, rank=rank) for rank in (0, 1, 2)], reaped="20 s"))
    assert one.first == First(3, "n2", "why")


def test_a_hang_is_told_from_a_lost_peer() -> None:
    assert judge(seen(failures=[failure(5)], dumps=True)).cause == "hang"
    assert judge(seen(-9, silent=True, reaped="3600 s")).cause == "hang"
    assert judge(seen(-9, reaped="20 s")).cause == "killed"


def test_the_time_limit_of_the_job() -> None:
    ended = judge(seen(said=[KILLED], failures=[failure(5, rank=0)], out_of_time=True))
    assert (ended.cause, ended.code) == ("timeout", 3)
    assert judge(seen(outcome=Outcome(1.0, 3, 9), out_of_time=True)).cause == "stopped"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "finished"),
        (1, "crash"),
        (2, "bad_input"),
        (3, "stopped"),
        (4, "unhealthy"),
        (5, "lost_contact"),
        (143, "killed"),
    ],
)
def test_without_any_words_the_exit_code_counts(code: int, cause: str) -> None:
    assert judge(seen(code)).cause == cause


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Traceback (most recent call last):\n  at a line\nOSError: b\n", "rank 3 on n2: OSError: b"),
        ("nothing moves\n  rank 1 is missing\n  a table\n", "rank 3 on n2: nothing moves; rank 1 is missing"),
        ("", "rank 3 on n2"),
    ],
)
def test_the_first_failure_in_one_line(text: str, shown: str) -> None:
    assert str(First(3, "n2", text)) == shown
    assert str(First(None, None, "x")) == "x"


def test_a_kill_that_srun_tells_late_is_still_the_cause() -> None:
    missed, killed = "srun: error: n1: task 1: Exited with exit code 5", KILLED
    told = [failure(5, rank=1, text="rank 3 is gone")]
    for said in ([missed, killed, *TERMINATED], [missed, TERMINATED[0], killed, TERMINATED[1]]):
        ended = judge(seen(said=said, failures=told))
        assert (ended.cause, ended.first) == ("killed", First(3, "n2", "Killed"))
    both = [missed, TERMINATED[0], killed, "srun: error: n1: task 0: Killed"]  # by Slurm, as they did not end
    assert judge(seen(said=both, failures=told)).cause == "lost_contact"


FULL = "/run/logs: No space left on device"


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 77])
def test_a_full_disk_is_the_cause_whatever_ranks_have_ended_with(code: int) -> None:
    """They could write down neither why nor that."""
    ended = judge(seen(code, full=FULL))
    assert (ended.cause, ended.code, ended.first) == ("unhealthy", 4, First(None, None, FULL))
    said = [f"srun: error: n2: task 3: Exited with exit code {code}", *TERMINATED]
    ended = judge(seen(143, full=FULL, said=said))
    assert (ended.cause, ended.first) == (
        "unhealthy",
        First(3, "n2", f"{FULL} (Exited with exit code {code})"),
    )
    assert judge(seen(failures=[failure(2, text="error: x: cannot be made")], full=FULL)).cause == "unhealthy"


def test_a_full_disk_hides_neither_a_kill_nor_an_end_that_was_told_or_asked_for() -> None:
    assert judge(seen(said=[KILLED, *TERMINATED], full=FULL)).cause == "killed"
    assert judge(seen(-9, full=FULL)).cause == "killed"
    assert judge(seen(0, full=FULL)).cause == "finished"
    assert judge(seen(3, outcome=Outcome(5.0, 3, 9), full=FULL)).cause == "stopped"
    assert judge(seen(3, asked=True, full=FULL)).cause == "stopped"
    assert judge(seen(130, full=FULL)).code == 130
    assert judge(seen(-9, silent=True, reaped="3600 s", full=FULL)).cause == "unhealthy"  # nothing could move


@pytest.mark.parametrize(
    ("said", "own"),
    [
        (["srun: error: Unable to create step for job 7: Unable to contact slurm controller (connect failure)"], True),
        (["srun: error: Unable to confirm allocation for job 7: Socket timed out on send/recv operation"], True),
        (
            ["srun: error: Unable to create step for job 7: Memory required by task is not available"],
            True,
        ),  # just after
        (["srun: fatal: Could not establish a configuration source"], True),
        (["srun: error: Task launch for StepId=7.0 failed on node n2: Socket timed out on send/recv operation"], False),
        (
            ["srun: error: n2: task 3: Exited with exit code 1", "srun: error: Unable to contact slurm controller"],
            False,
        ),
        (["srun: error: Application launch failed: Socket timed out on send/recv operation"], False),
        (["srun: error: Unable to create step for job 7: Required node not available (down or drained)"], False),
        (["srun: error: Unable to create step for job 7: Job/step already completing or completed"], False),
        (["srun: error: Unable to create step for job 7: More processors requested than permitted"], False),
        (["srun: error: Unable to create step for job 7: Requested node configuration is not available"], False),
        (["srun: error: Munge encode failed: Failed to access the socket"], True),
        ([], False),
    ],
)
def test_an_error_of_srun_itself_is_no_crash_of_training(said: list[str], own: bool) -> None:
    ended = judge(seen(1, said=said, met=False))
    assert (ended.cause == "lost_contact") == own
    if own:
        assert ended.first is not None
        assert said[0].endswith(ended.first.text)
    assert judge(seen(1, said=said)).cause == "crash"  # as training was under way


def test_a_stop_of_which_only_the_exit_code_tells_is_no_certainty() -> None:
    assert "no rank has told it" in str(judge(seen(3)).first)
    assert judge(seen(3, asked=True)).first is None
    assert judge(seen(3, outcome=Outcome(5.0, 3, 9))).first is None
