"""The supervisor from beginning to end, with a Slurm and a clock that are made up."""

import errno
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import RUNNING, Ranks, World

from megalite_launch.base.events import append_event, read_events
from megalite_launch.base.slurm import SlurmJob
from megalite_launch.supervise.policy import NODE_SHORTAGE, RestartLimits, Wants
from megalite_launch.supervise.supervisor import Check, Supervisor


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def crash(ranks: Ranks) -> int | None:
    return ranks.fail(1)


def test_training_that_finishes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.supervisor(lambda ranks: ranks.finish() if ranks.looks > 3 else None).run() == 0
    assert world.told() == ["begin", "preflight", "attempt", "attempt_ended", "end"]
    assert world.slurm.ran == [("n1", "n2")]
    begin, attempt, ended = (world.last(event) for event in ("begin", "attempt", "attempt_ended"))
    assert (begin["nodes"], begin["spares"], begin["step"]) == (["n1", "n2", "n3"], 1, 0)
    assert (attempt["attempt"], attempt["nodes"], attempt["ranks"]) == ("7.0.0", ["n1", "n2"], 4)
    assert (ended["cause"], ended["first"], ended["code"]) == ("finished", None, 0)
    assert world.slurm.did == ["begin", "end"]
    assert capsys.readouterr().err.count("megalite supervisor: ") == 5


def test_a_crash_starts_the_ranks_again_at_once(world: World) -> None:
    assert world.supervisor(crash, lambda ranks: ranks.finish()).run() == 0
    assert world.told()[2:] == ["attempt", "attempt_ended", "preflight", "attempt", "attempt_ended", "end"]
    assert world.last("attempt")["attempt"] == "7.0.1"
    assert world.clock.time < 1
    first = read_events(world.folder.events)[3]["first"]
    assert first == {"rank": 3, "node": "n2", "text": "why"}


def test_three_attempts_without_a_newer_checkpoint_end_it(world: World) -> None:
    assert world.supervisor(crash).run() == 1
    assert len(world.slurm.ran) == 3
    assert "3 attempts in a row" in world.last("end")["reason"]
    assert "requeue" not in world.slurm.did


def test_attempts_that_save_go_on(world: World) -> None:
    def save_and_crash(ranks: Ranks) -> int | None:
        ranks.save(len(world.slurm.ran))
        return ranks.fail(1, rank=len(world.slurm.ran) % 2)

    assert world.supervisor(*[save_and_crash] * 6, lambda ranks: ranks.finish()).run() == 0
    assert len(world.slurm.ran) == 7


@pytest.mark.parametrize("code", [2, 4])
def test_bad_input_and_unhealthy_training_end_it_at_once(world: World, code: int) -> None:
    assert world.supervisor(lambda ranks: ranks.fail(code)).run() == code
    assert len(world.slurm.ran) == 1
    assert world.last("end")["code"] == code


def test_a_node_that_fails_first_twice_is_replaced_by_a_spare(world: World) -> None:
    def save_and_crash(ranks: Ranks) -> int | None:
        ranks.save(len(world.slurm.ran))
        return ranks.fail(1, rank=4)

    assert world.supervisor(crash, crash, save_and_crash, lambda ranks: ranks.finish()).run() == 0
    assert world.slurm.ran == [("n1", "n2"), ("n1", "n2"), ("n1", "n3"), ("n1", "n3")]
    assert (world.last("left_out")["node"], world.told().count("left_out")) == ("n2", 1)


def test_a_requeued_job_still_knows_which_node_has_failed(world: World) -> None:
    world.supervisor(crash, crash, lambda ranks: ranks.finish()).run()
    supervisor = world.supervisor(lambda ranks: ranks.finish())
    world.slurm.restart = 1
    assert supervisor.run() == 0
    assert world.slurm.ran == [("n1", "n3")]
    assert world.last("attempt")["attempt"] == "7.1.0"


def test_a_node_that_fails_its_check_is_replaced_for_this_attempt(world: World) -> None:
    supervisor = world.supervisor(crash, lambda ranks: ranks.finish())
    world.slurm.bad = [{"n1": "ECC errors"}, {}]
    assert supervisor.run() == 0
    assert world.slurm.ran == [("n2", "n3"), ("n1", "n2")]
    found = read_events(world.folder.events)[1]
    assert (found["ok"], found["bad"]) == (["n2", "n3"], {"n1": "ECC errors"})


def test_fewer_nodes_than_wanted_are_told(world: World) -> None:
    supervisor = world.supervisor(lambda ranks: ranks.finish())
    world.slurm.bad = [{"n1": "dead", "n3": "dead"}]
    assert supervisor.run() == 0
    assert "on 1 node (of 2 wanted)" in world.last("attempt")["text"]


def test_the_largest_number_of_nodes_that_the_check_accepts(world: World) -> None:
    asked: list[int] = []
    world.wants = Wants(3, 1, 0, 4)
    world.check = lambda ranks: Check(0 if asked.append(ranks) or ranks < 8 else 2, "must be divisible")
    assert world.supervisor(crash, lambda ranks: ranks.finish()).run() == 0
    assert world.slurm.ran == [("n1",), ("n1",)]
    assert asked == [12, 8, 4, 12, 8]  # a refused size is asked for again: a file may have been away


def test_what_fits_no_number_of_nodes_is_bad_input(world: World) -> None:
    world.check = lambda ranks: Check(2, "model.heads = 3: no")
    assert world.supervisor(crash).run() == 2
    assert world.slurm.ran == []
    assert "model.heads = 3: no" in world.last("end")["reason"]


def test_a_check_that_fails_otherwise_leaves_it_to_the_ranks(world: World) -> None:
    world.check = lambda ranks: Check(1, "a file system that does not answer")
    assert world.supervisor(lambda ranks: ranks.finish()).run() == 0


def test_what_does_not_fit_the_nodes_that_are_left_waits_for_others(world: World) -> None:
    world.check = lambda ranks: Check(0 if ranks == 4 else 2, "too few")
    supervisor = world.supervisor(crash)
    world.slurm.bad = [{"n1": "dead", "n3": "dead"}]
    assert supervisor.run() == NODE_SHORTAGE
    assert world.slurm.did.count("requeue") == 1
    assert "too few" in world.last("requeue")["reason"]


def test_too_few_healthy_nodes_requeue_a_job_three_times_at_most(world: World) -> None:
    for restart in range(3):
        supervisor = world.supervisor(crash)
        world.slurm.bad, world.slurm.restart = [dict.fromkeys(("n1", "n2", "n3"), "dead")], restart
        world.slurm.jobs = [replace(RUNNING, restarts=restart)]
        assert supervisor.run() == NODE_SHORTAGE
        assert world.slurm.did.count("requeue") == (restart < 2)
    assert "0 of at least 1 nodes" in world.last("end")["reason"]


def stop(supervisor: Supervisor, code: int = 3) -> Callable[[Ranks], int | None]:
    """Ranks that hear of a signal to the supervisor, save, and stop."""

    def script(ranks: Ranks) -> int | None:
        if ranks.looks == 2:
            supervisor.hear(signal.SIGTERM)
        if not ranks.asked:
            return None
        ranks.save(5)
        return ranks.finish(code)

    return script


def test_a_stop_is_handed_on_and_the_job_requeued(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts = [stop(supervisor)]
    assert supervisor.run() == 3
    assert world.slurm.did == ["begin", "end", "requeue", "end"]  # the guard must not requeue it once more
    assert world.told()[-2:] == ["attempt_ended", "requeue"]
    assert (world.last("attempt_ended")["cause"], world.last("attempt_ended")["asked"]) == ("stopped", True)


def test_a_stop_that_only_the_ranks_have_heard_requeues_too(world: World) -> None:
    assert world.supervisor(lambda ranks: ranks.save(5) or ranks.finish(3)).run() == 3
    assert "requeue" in world.slurm.did


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (SlurmJob("COMPLETING", may_requeue=True), "it was cancelled"),
        (SlurmJob("COMPLETING", "TimeLimit", may_requeue=True), "TimeLimit"),
        (SlurmJob("RUNNING", may_requeue=False), "--no-requeue"),
        (None, "Slurm does not answer"),
    ],
)
def test_a_stopped_job_that_slurm_does_not_requeue_ends_with_3(world: World, job: SlurmJob | None, words: str) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts, world.slurm.jobs = [stop(supervisor)], [RUNNING, job]
    assert supervisor.run() == 3
    assert "requeue" not in world.slurm.did
    assert world.told()[-2:] == ["not_requeued", "end"]
    assert words in world.last("not_requeued")["reason"]
    assert world.last("attempt_ended")["cause"] == "stopped"


def test_slurm_is_asked_patiently(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts, world.slurm.jobs = [stop(supervisor)], [RUNNING, None, None, None, None, RUNNING]
    world.slurm.refusals = ["Socket timed out", "Socket timed out", ""]
    assert supervisor.run() == 3
    assert world.slurm.did.count("requeue") == 3
    assert world.told()[-1] == "requeue"
    assert world.told().count("requeue") == 1


def test_a_requeue_that_slurm_has_obeyed_without_an_answer_counts(world: World) -> None:
    supervisor = world.supervisor(crash)
    pending = SlurmJob("PENDING", may_requeue=True, restarts=1)
    world.slurm.attempts, world.slurm.jobs = [stop(supervisor)], [RUNNING, RUNNING, RUNNING, pending]
    world.slurm.refusals = ["Socket timed out"]
    assert supervisor.run() == 3
    assert world.told()[-1] == "requeue"


def test_slurm_that_refuses_is_told(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts, world.slurm.refusals = [stop(supervisor)], ["Access denied"]
    assert supervisor.run() == 3
    assert "Slurm refused: Access denied" in world.last("not_requeued")["reason"]
    assert world.clock.time >= world.limits.patience


def test_the_limit_on_requeues(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts, world.slurm.restart = [stop(supervisor)], 1000
    world.slurm.jobs = [SlurmJob("RUNNING", may_requeue=True, restarts=1000)]
    assert supervisor.run() == 3
    assert "requeued 1000 times" in world.last("not_requeued")["reason"]


def test_no_attempt_follows_when_the_job_was_cancelled_or_requeued_by_others(world: World) -> None:
    for job in (SlurmJob("COMPLETING"), SlurmJob("RUNNING", may_requeue=True, restarts=1)):
        supervisor = world.supervisor(crash)
        world.slurm.jobs = [RUNNING, job]
        assert supervisor.run() == 1
        assert len(world.slurm.ran) == 1
        assert world.told()[-1] == "end"


def test_a_stop_before_the_ranks_are_there_starts_none(world: World) -> None:
    supervisor = world.supervisor(crash)
    supervisor.hear(signal.SIGUSR1)
    assert supervisor.run() == 3
    assert (world.slurm.ran, world.told()) == ([], ["begin", "requeue"])
    assert "stopped by SIGUSR1 before the ranks were started" in world.last("requeue")["reason"]


def test_a_stop_during_the_preflight_starts_none(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.examine = lambda *_: supervisor.hear(signal.SIGTERM) or {"n1": "left off"}  # type: ignore[method-assign]
    assert supervisor.run() == 3
    assert (world.slurm.ran, world.told()) == ([], ["begin", "requeue"])


def test_ranks_that_die_while_they_stop_are_requeued(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts = [lambda ranks: ranks.fail(5) if supervisor.hear(signal.SIGTERM) is None else None]
    assert supervisor.run() == 3
    assert "ended (lost_contact) while it was to stop" in world.last("requeue")["reason"]


def test_the_time_limit_is_told(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts = [lambda ranks: 143 if supervisor.hear(signal.SIGTERM) is None else None]
    world.slurm.jobs = [RUNNING, SlurmJob("COMPLETING", "TimeLimit", may_requeue=True)]
    assert supervisor.run() == 3
    assert world.last("attempt_ended")["cause"] == "timeout"


def test_ranks_that_spin_after_a_failure_are_killed(world: World) -> None:
    def spin(ranks: Ranks) -> None:
        ranks.fail(5, text="rank 1 is gone")

    assert world.supervisor(spin, lambda ranks: ranks.finish()).run() == 0
    reaped = world.last("reaped")
    assert (reaped["attempt"], reaped["reason"][:30]) == ("7.0.0", "a rank has failed 20 s ago and")
    assert 20 <= world.clock.time < 22
    assert world.slurm.full == [True, True]  # what has hung may be the hardware


def test_ranks_that_do_not_stop_are_killed(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.attempts = [lambda ranks: supervisor.hear(signal.SIGTERM) if ranks.looks == 1 else None]
    assert supervisor.run() == 3
    assert "asked to stop 240 s ago" in world.last("reaped")["reason"]


def test_ranks_in_whose_run_folder_nothing_moves_are_killed(world: World) -> None:
    world.limits = RestartLimits(silence=100)
    assert world.supervisor(lambda ranks: None, lambda ranks: ranks.finish()).run() == 0
    ended = read_events(world.folder.events)[4]
    assert (ended["event"], ended["cause"]) == ("attempt_ended", "hang")
    assert 100 <= world.clock.time < 110


def test_only_suspicious_hardware_is_examined_in_full_again(world: World) -> None:
    world.supervisor(crash, lambda ranks: ranks.fail(5), lambda ranks: ranks.finish()).run()
    assert world.slurm.full == [True, False, True]


def test_another_job_in_the_run_folder_is_not_disturbed(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.other = "Slurm job 6"
    assert supervisor.run() == 2
    assert (world.told(), world.slurm.ran, world.slurm.did) == (["refused"], [], [])
    assert "Slurm job 6 is at work in this run folder" in world.last("refused")["text"]


def test_a_full_disk_changes_no_decision(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megalite_launch.supervise.supervisor.append_event", full)
    assert world.supervisor(crash).run() == 1
    assert len(world.slurm.ran) == 3  # counted in memory
    assert "cannot be written: No space left on device" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written_ends_it(world: World) -> None:
    world.folder.path.mkdir()
    (world.folder.path / "attempts").write_text("")
    assert world.supervisor(crash).run() == 4
    assert "attempts" in world.last("end")["reason"]


def test_the_memory_is_the_file_of_events(world: World) -> None:
    world.folder.path.mkdir()
    for number in range(2):
        append_event(
            world.folder.events, "attempt_ended", "supervisor", "", job="7", from_step=0, to_step=0, cause="crash"
        )
        assert json.loads(world.folder.events.read_text().splitlines()[number])["job"] == "7"
    assert world.supervisor(crash).run() == 1
    assert len(world.slurm.ran) == 1


def test_on_one_machine_nothing_is_requeued_and_every_signal_is_handed_on_once(world: World) -> None:
    supervisor = world.supervisor(crash)

    def twice(ranks: Ranks) -> int | None:
        if ranks.looks in (2, 4):
            supervisor.hear(signal.SIGINT)
        return ranks.finish(3) if ranks.looks > 6 else None

    world.slurm.attempts, world.slurm.where = [twice], "local"
    assert supervisor.run() == 3
    assert world.slurm.ranks[0].asked == [signal.SIGINT, signal.SIGINT]
    assert world.told()[-1] == "end"
    assert "the same command goes on" in world.last("end")["reason"]


@pytest.mark.parametrize("put", [None, "metrics.jsonl"], ids=["removed", "replaced"])
def test_a_run_folder_that_vanishes_ends_it(world: World, put: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    def vanish(ranks: Ranks) -> int | None:
        if ranks.looks == 20:
            shutil.rmtree(world.folder.path)
            if put:
                world.folder.path.mkdir()
                (world.folder.path / put).touch()
        return None

    assert world.supervisor(vanish).run() == 4
    assert len(world.slurm.ran) == 1
    assert world.slurm.ranks[0].killed
    assert "requeue" not in world.slurm.did
    told = capsys.readouterr().err
    assert f"the run folder {'was replaced' if put else 'was removed'}" in told.splitlines()[-1]
    left = [path.name for path in world.folder.path.iterdir()] if put else world.folder.path.exists()
    assert left == ([put] if put else False)


def test_a_run_folder_that_is_out_of_sight_for_a_moment(world: World) -> None:
    aside = world.folder.path.with_name("aside")

    def blink(ranks: Ranks) -> int | None:
        if ranks.looks == 5:
            world.folder.path.rename(aside)
        return ranks.finish() if ranks.looks > 30 else None

    pause = world.clock.pause

    def pausing(seconds: float) -> None:
        pause(seconds)
        if aside.exists() and world.clock.time > 0.65:  # of the looks that it takes to believe it, two have been taken
            aside.rename(world.folder.path)

    world.clock.pause = pausing  # type: ignore[method-assign]
    assert world.supervisor(blink).run() == 0
    assert len(world.slurm.ran) == 1


def test_a_full_disk_is_told_where_ranks_could_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "megalite_launch.supervise.supervisor.no_room"
    monkeypatch.setattr(full, lambda path: f"{path}/logs: No space left on device")
    for code in (1, 2, 3, 4, 5):
        assert world.supervisor(lambda ranks, code=code: code).run() == 4
        assert f"{world.folder.path}/logs: No space left on device" in world.last("end")["reason"]
        assert world.last("attempt_ended")["cause"] == "unhealthy"
    assert world.slurm.did.count("requeue") == 0


def test_a_stop_that_was_asked_for_on_a_full_disk_is_a_stop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite_launch.supervise.supervisor.no_room", lambda path: f"{path}: No space left on device")
    supervisor = world.supervisor(crash)
    world.slurm.attempts = [lambda ranks: supervisor.hear(signal.SIGTERM) or 3]  # type: ignore[func-returns-value]
    assert supervisor.run() == 3
    assert world.last("attempt_ended")["cause"] == "stopped"


def test_a_file_that_is_away_for_a_while_does_not_end_a_job_that_has_trained(world: World) -> None:
    bad = [lambda ranks: ranks.fail(2, text="error: data: is not there")] * 5
    assert world.supervisor(crash, *bad, lambda ranks: ranks.finish()).run() == 0
    waiting = [event for event in read_events(world.folder.events) if event["event"] == "waiting"]
    assert [event["seconds"] for event in waiting] == [5, 10, 20, 40, 80]
    assert 155 <= world.clock.time < 160
    assert "data: is not there; this job has trained with it before" in waiting[0]["text"]


def test_a_file_that_stays_away_ends_it(world: World) -> None:
    assert world.supervisor(crash, lambda ranks: ranks.fail(2)).run() == 2
    assert len(world.slurm.ran) == world.limits.pauses + 2
    assert "12 pauses in a row have not fixed that" in world.last("end")["reason"]


def test_a_check_that_refuses_what_has_trained_is_asked_again(world: World) -> None:
    answers = [Check(0), Check(2, "data: is not there"), Check(2, "data: is not there"), Check(0)]
    world.check = lambda ranks: answers.pop(0)
    world.wants = Wants(2, 2, 0, 2)
    assert world.supervisor(lambda ranks: ranks.save(5) or ranks.finish(3)).run() == 3  # and Slurm starts it again
    answers.insert(0, Check(2, "data: is not there"))
    supervisor = world.supervisor(lambda ranks: ranks.finish())
    world.slurm.restart, world.slurm.jobs = 1, [replace(RUNNING, restarts=1)]
    assert supervisor.run() == 0
    assert world.told().count("waiting") == 3
    assert "refused: data: is not there" in world.last("waiting")["reason"]


def test_a_signal_ends_the_pause(world: World) -> None:
    supervisor = world.supervisor(crash, lambda ranks: ranks.fail(2))
    pause = world.clock.pause

    def pausing(seconds: float) -> None:
        pause(seconds)
        if "waiting" in world.told() and world.clock.time > 2 and not supervisor.asked:
            supervisor.hear(signal.SIGTERM)

    world.clock.pause = pausing  # type: ignore[method-assign]
    assert supervisor.run() == 3
    assert world.clock.time < 4
    assert "before the ranks were started" in world.last("requeue")["reason"]


def test_attempts_in_which_ranks_never_meet_wait_and_do_not_count(world: World) -> None:
    supervisor = world.supervisor(*[lambda ranks: 5] * 6, lambda ranks: ranks.finish())
    world.slurm.meet = False
    assert supervisor.run() == 0
    assert len(world.slurm.ran) == 7
    assert world.told().count("waiting") == 6
    ended = [event for event in read_events(world.folder.events) if event["event"] == "attempt_ended"]
    assert {event["met"] for event in ended[:-1]} == {False}
    assert ended[-1]["met"]  # as it has made steps


def test_a_supervisor_that_fails_says_so(world: World) -> None:
    supervisor = world.supervisor(crash)
    world.slurm.examine = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        supervisor.run()
    end = world.last("end")
    assert (end["code"], end["reason"]) == (1, "the supervisor has failed: ZeroDivisionError: division by zero")
    assert world.slurm.did[-1] == "end"


def test_the_step_from_which_ranks_went_on_is_what_they_say(world: World) -> None:
    """The newest checkpoint was damaged."""

    def resume(ranks: Ranks) -> int | None:
        (ranks.run.checkpoints / "step-00000160").rename(ranks.run.checkpoints / "step-00000160.damaged")
        with ranks.run.metrics.open("a") as file:
            file.write('{"step": 160, "loss": 1.0}\n{"event": "resumed", "step": 140}\n')
        ranks.save(150)
        return ranks.fail(1)

    (world.folder.checkpoints / "step-00000140").mkdir(parents=True)
    (world.folder.checkpoints / "step-00000160").mkdir()
    world.folder.metrics.write_text('{"event": "resumed", "step": 20}\n')
    assert world.supervisor(resume, lambda ranks: ranks.finish()).run() == 0
    ended = [event for event in read_events(world.folder.events) if event["event"] == "attempt_ended"]
    assert [(event["from_step"], event["to_step"]) for event in ended] == [(140, 150), (150, 150)]
    assert "steps 140 to 150" in ended[0]["text"]


def test_of_two_jobs_that_begin_at_the_same_moment_the_second_ends(world: World) -> None:
    """By the order of their events: when each looked for the other, neither had begun."""
    supervisor = world.supervisor(crash)
    append_event(world.folder.events, "begin", "supervisor", "", job="6", restart=0)
    seen: list[list[str]] = []

    def rival(events: list[dict]) -> str:
        seen.append([event["job"] for event in events])
        return "Slurm job 6" if len(seen) == 2 else ""

    world.slurm.rival = rival  # type: ignore[method-assign, assignment]
    assert supervisor.run() == 2
    assert seen == [["6"], ["6"]]
    assert (world.slurm.ran, world.told()) == ([], ["begin", "begin", "end"])
    assert "Slurm job 6 has begun in this run folder at the same moment" in world.last("end")["reason"]
