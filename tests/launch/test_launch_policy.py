"""What the supervisor decides, from observations alone."""

from dataclasses import replace

import pytest

from megalite_launch.base.slurm import SlurmJob
from megalite_launch.base.verdict import Ended, First
from megalite_launch.supervise.policy import (
    END,
    FAILURE_MEMORY,
    NODE_SHORTAGE,
    RELAUNCH,
    REQUEUE,
    Past,
    Patience,
    RestartLimits,
    choose,
    next_move,
    no_nodes,
    slow_nodes,
    struck_nodes,
    why_not_requeue,
)

LIMITS = RestartLimits()
EVER = 1e9  # a time


def ended(cause: str, code: int, asked: bool = False, last: int = 7) -> Ended:
    return Ended(cause, code, First(3, "n2", "a line\nthe table"), asked, (5, last))


def attempt(job: str = "7", cause: str = "crash", node: str | None = "n2", steps=(0, 0), **more: object) -> dict:
    first = None if node is None else {"rank": 3, "node": node, "text": ""}
    event = {"event": "attempt_ended", "job": job, "time": EVER, "cause": cause, "first": first}
    return event | {"from_step": steps[0], "to_step": steps[1], "asked": False} | more


@pytest.mark.parametrize(
    ("cause", "code", "asked", "kind", "exit_code"),
    [
        ("finished", 0, False, END, 0),
        ("finished", 0, True, END, 0),
        ("bad_input", 2, False, END, 2),
        ("bad_input", 2, True, END, 2),
        ("unhealthy", 4, False, END, 4),
        ("stopped", 130, False, END, 130),
        ("stopped", 3, False, REQUEUE, 3),  # on a signal that only the ranks have heard
        ("stopped", 3, True, REQUEUE, 3),
        ("timeout", 3, True, REQUEUE, 3),  # which Slurm then does not allow
        ("crash", 1, False, RELAUNCH, 1),
        ("killed", 5, False, RELAUNCH, 5),
        ("lost_contact", 5, False, RELAUNCH, 5),
        ("hang", 5, False, RELAUNCH, 5),
        ("crash", 1, True, REQUEUE, 3),
        ("killed", 5, True, REQUEUE, 3),
    ],
)
def test_what_follows_on_an_attempt(cause: str, code: int, asked: bool, kind: str, exit_code: int) -> None:
    move = next_move(ended(cause, code, asked), Past(), LIMITS)
    assert (move.kind, move.code) == (kind, exit_code)


def test_attempts_without_a_newer_checkpoint_are_bounded() -> None:
    assert next_move(ended("crash", 1), Past(2), LIMITS).kind == RELAUNCH
    move = next_move(ended("crash", 1), Past(3), LIMITS)
    assert (move.kind, move.code) == (END, 1)
    assert move.reason == "3 attempts in a row have saved no newer checkpoint: rank 3 on n2: a line; the table"
    assert next_move(Ended("stopped", 3), Past(1), LIMITS).reason.endswith("; nothing was saved yet")
    assert next_move(ended("stopped", 3), Past(3), LIMITS).kind == END
    assert next_move(ended("finished", 0), Past(3), LIMITS).code == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Traceback (most recent call last)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", END),
        ("Traceback (most recent call last)\nRuntimeError: a bug", RELAUNCH),
        ("out of memory: killed process 7", RELAUNCH),
    ],
)
def test_a_gpu_out_of_memory_ends_a_job_that_asks_for_that(text: str, kind: str) -> None:
    found = Ended("crash", 1, First(3, "n2", text))
    assert next_move(found, Past(1), replace(LIMITS, oom_ends=True)).kind == kind
    assert next_move(found, Past(1), LIMITS).kind == RELAUNCH


def test_starts_without_enough_nodes_are_bounded() -> None:
    assert (no_nodes(1, 2, 2, LIMITS).kind, no_nodes(1, 2, 3, LIMITS).kind) == (REQUEUE, END)
    assert no_nodes(1, 2, 3, LIMITS).code == NODE_SHORTAGE
    assert no_nodes(1, 2, 1, LIMITS).reason == "1 of at least 2 nodes are fit for use"


@pytest.mark.parametrize(
    ("job", "restart", "words"),
    [
        (SlurmJob("RUNNING", may_requeue=True), 0, ""),
        (SlurmJob("RUNNING", may_requeue=True, restarts=3), 3, ""),
        (SlurmJob("SIGNALING", may_requeue=True), 0, ""),  # a node has not passed a signal on yet
        (SlurmJob("SUSPENDED", may_requeue=True), 0, "SUSPENDED"),
        (None, 0, "does not answer"),
        (SlurmJob("COMPLETING", may_requeue=True), 0, "cancelled"),
        (SlurmJob("COMPLETING", "TimeLimit", may_requeue=True), 0, "COMPLETING, TimeLimit"),
        (SlurmJob("PENDING", may_requeue=True, restarts=1), 0, "PENDING"),
        (
            SlurmJob("RUNNING", may_requeue=True, restarts=1),
            0,
            "requeued and started",
        ),  # by somebody else, while this one was frozen
        (SlurmJob("GONE"), 0, "GONE"),
        (SlurmJob("RUNNING", may_requeue=False), 0, "--no-requeue"),
        (SlurmJob("RUNNING", may_requeue=True, restarts=1000), 1000, "requeued 1000 times"),
    ],
)
def test_a_job_is_requeued_only_if_slurm_says_that_it_runs(job: SlurmJob | None, restart: int, words: str) -> None:
    why = why_not_requeue(job, restart, LIMITS)
    assert bool(why) == bool(words)
    assert words in why


def test_progress_starts_the_count_of_attempts_anew() -> None:
    events = [attempt(), attempt(), attempt(steps=(0, 5))]
    assert Past.of(events, "7").stuck == 0
    assert Past.of([*events, attempt(steps=(5, 5)), attempt("8")], "7").stuck == 1
    assert (
        Past.of([*events, attempt(), {"event": "requeue", "job": "7", "code": NODE_SHORTAGE, "time": EVER}], "7").stuck
        == 2
    )
    assert Past.of([*events, attempt(), {"event": "requeue", "job": "7", "code": 3, "time": EVER}], "7").stuck == 1
    assert Past.of([attempt(steps=(None, "9"))], "7").stuck == 1


@pytest.mark.parametrize("cause", ["lost_contact", "hang", "killed", "stopped", "timeout"])
def test_attempts_in_which_ranks_never_met_count_for_nothing(cause: str) -> None:
    unmet = attempt(cause=cause, met=False, node=None if cause == "stopped" else "n2")
    assert Past.of([unmet] * 9, "7") == Past()
    assert Past.of([attempt(met=True), *[unmet] * 9], "7") == Past(stuck=1, trained=True)
    assert Past.of([attempt(cause="crash", met=False)] * 2, "7").stuck == 2  # a rank has failed by itself
    assert Past.of([attempt(cause=cause)] * 2, "7").stuck == 2  # as events were before
    told = attempt(cause="stopped", met=False)  # says an exit code alone, for which `first` gives the reason
    assert Past.of([told] * 2, "7").stuck == 2


def test_bad_input_of_a_job_that_has_trained_does_not_count_as_stuck() -> None:
    bad = attempt(cause="bad_input", met=True)
    assert Past.of([bad, bad], "7") == Past()
    waiting = {"event": "waiting", "job": "7", "time": EVER}
    assert Past.of([attempt(met=True), bad, waiting, bad, waiting], "7") == Past(1, 2, True)
    assert Past.of([attempt(met=True), bad, waiting, attempt(met=True)], "7") == Past(2, 0, True)
    assert Past.of([attempt(cause="bad_input", steps=(0, 5))], "7").trained  # it has saved before the file went away


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (ended("bad_input", 2), 2, "this job has trained with it before"),
        (replace(ended("lost_contact", 5), met=False), 5, "lost_contact, before all ranks had met"),
        (replace(ended("killed", 5), met=False), 5, "before all ranks had met"),
    ],
)
def test_what_may_mend_itself_is_waited_for_with_growing_pauses_and_an_end(found: Ended, code: int, words: str) -> None:
    moves = [next_move(found, Past(0, pauses, True), LIMITS) for pauses in range(LIMITS.pauses + 1)]
    assert [move.pause for move in moves[:8]] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert {(move.kind, move.code) for move in moves[:-1]} == {(RELAUNCH, code)}
    assert (moves[-1].kind, moves[-1].code) == (END, code)
    assert words in moves[0].reason
    assert "12 pauses in a row have not fixed that" in moves[-1].reason
    assert next_move(replace(found, asked=True), Past(0, 3, True), LIMITS).kind == REQUEUE


def test_a_node_that_fails_first_twice_is_remembered_for_a_day() -> None:
    assert struck_nodes([attempt()], EVER, 2) == {}
    assert struck_nodes([attempt("6"), attempt("7", "killed")], EVER, 2) == {"n2": 2}
    assert struck_nodes([attempt(), attempt(node="n1")], EVER, 2) == {}
    assert struck_nodes([attempt(), attempt(time=EVER - FAILURE_MEMORY - 1)], EVER, 2) == {}
    harmless = [attempt(asked=True), attempt(cause="bad_input"), attempt(cause="stopped"), attempt(node=None)]
    assert struck_nodes([*harmless, *harmless, attempt(first={"node": ["n2"]}), attempt(first="n2")], EVER, 1) == {}


def test_a_failure_dated_far_ahead_speaks_against_nobody() -> None:
    """Else its node would be left out until that day."""
    ahead = {"event": "straggler", "time": EVER + 2 * FAILURE_MEMORY, "node": "n3"}
    events = [attempt(time=EVER + 2 * FAILURE_MEMORY)] * 3
    assert struck_nodes(events, EVER, strikes=2) == {}
    assert slow_nodes([ahead], EVER) == set()
    assert struck_nodes([attempt(time=EVER + 60)] * 2, EVER, strikes=2) == {"n2": 2}


def test_slow_nodes_are_those_that_ranks_have_named() -> None:
    found = [{"event": "straggler", "time": EVER, "node": "n1"}, {"event": "straggler", "time": 0, "node": "n2"}]
    assert slow_nodes([*found, {"event": "straggler", "time": EVER, "node": 3}], EVER) == {"n1"}


NODES = ["n1", "n2", "n3", "n4"]


@pytest.mark.parametrize(
    ("struck", "slow", "sizes", "chosen"),
    [
        ([], [], (4, 4), "n1 n2 n3 n4"),
        ([], [], (3, 3), "n1 n2 n3"),  # n4 is a spare
        (["n2"], [], (3, 3), "n1 n3 n4"),
        ([], ["n1"], (3, 3), "n2 n3 n4"),
        ([], ["n1"], (4, 2), "n1 n2 n3 n4"),  # slow, but no spare
        (["n2"], [], (4, 2), "n1 n3 n4"),
        (["n2"], ["n3"], (4, 4), "n1 n2 n3 n4"),  # or there would be too few
        (["n1", "n2"], [], (4, 3), "n1 n3 n4"),
        ([], [], (6, 5), ""),
    ],
)
def test_the_choice_of_nodes(struck: list[str], slow: list[str], sizes: tuple[int, int], chosen: str) -> None:
    choice = choose(NODES, dict.fromkeys(struck, 2), set(slow), sizes, lambda size: True)
    assert " ".join(choice.nodes) == chosen
    if choice.nodes:
        assert {node for node, _ in choice.left_out} == {*struck, *slow} - set(choice.nodes)


def test_the_largest_number_of_nodes_on_which_training_fits() -> None:
    assert choose(NODES, {}, set(), (4, 1), lambda size: size in (1, 2)).nodes == ("n1", "n2")
    choice = choose(NODES, {"n1": 2}, set(), (4, 2), lambda size: False)
    assert (choice.nodes, choice.fit, choice.left_out) == ((), 3, ())


def looks(patience: Patience, until: float, **seen: object) -> tuple[float, str]:
    """When the patience is over, with a look every second, and the reason."""
    now = patience.before
    while now < until:
        now += 1
        if why := patience.look(
            now, *(bool(seen.get(name)) for name in ("failed", "over", "asked")), seen.get("trace")
        ):
            return now, why
    return now, ""


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("failed", 21, "a rank has failed 20 s ago"),
        ("over", 121, "that they end"),
        ("asked", 241, "asked to stop 240 s"),
    ],
)
def test_ranks_that_do_not_end_are_killed(name: str, at: float, words: str) -> None:
    when, why = looks(Patience(LIMITS, 0.0), 1000, **{name: True})
    assert when == at
    assert words in why


def test_silence_is_measured_in_looks() -> None:
    patience = Patience(LIMITS, 0.0)
    assert looks(patience, 3500) == (3500, "")
    assert patience.look(3600, False, False, False, "it moves") == ""
    assert looks(patience, 7000, trace="it moves") == (7000, "")
    assert patience.look(20_000, False, False, False, "it moves") == ""  # this process has slept, not the ranks
    assert not patience.silent
    when, why = looks(patience, 30_000, trace="it moves")
    assert when < 20_300
    assert "nothing has moved in the run folder for 3600 s" in why
    assert patience.silent
    assert looks(Patience(RestartLimits(silence=0), 0.0), 10_000) == (10_000, "")
