"""Slurm's commands: what is asked, and what is made of the answers. And the guard, which asks the same."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megalite_launch.base.errors import UserError
from megalite_launch.base.events import read_events
from megalite_launch.base.run_folder import RunFolder
from megalite_launch.base.slurm import Answer, Slurm, SlurmJob, call, patiently
from megalite_launch.supervise import batch_host_guard as guards
from megalite_launch.supervise.batch_host_guard import Guard, Heart, guard

SHOWN = """JobId=7 JobName=a   JobState=RUNNING Reason=None   Requeue=1 Restarts=0
   UserId=root(0)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=0 Restarts=4 BatchFlag=1 Reboot=0 ExitCode=0:0
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   Comment=   JobState=RUNNING
"""
TIMED_OUT = Answer(1, "", "slurm_load_jobs error: Socket timed out on send/recv operation")


class Fake:
    """Answers commands one after another, and notes them. The last answer stays."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.asked = list(answers), list[list[str]]()

    def __call__(self, command: Sequence[str]) -> Answer:
        self.asked.append(list(command))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_a_job_is_read_from_lines_that_its_user_does_not_write() -> None:
    job = Slurm("7", Fake(Answer(0, SHOWN.format(state="COMPLETING", reason="TimeLimit"), ""))).job()
    assert job == SlurmJob("COMPLETING", "TimeLimit", False, 4, "n[1-2]")


@pytest.mark.parametrize("answer", [TIMED_OUT, Answer(0, "", ""), Answer(0, "JobId=7 JobState=RUNNING Requeue=1", "")])
def test_no_answer_is_none(answer: Answer) -> None:
    assert Slurm("7", Fake(answer)).job() is None


def test_a_job_that_slurm_has_forgotten_is_gone() -> None:
    assert Slurm("7", Fake(Answer(1, "", "slurm_load_jobs error: Invalid job id specified"))).job() == SlurmJob("GONE")


@pytest.mark.parametrize("number", ["", "7;reboot", "-1", "7 8", "$(x)"])
def test_only_numbers_are_jobs(number: str) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_ID"):
        Slurm(number)


@pytest.mark.parametrize(("out", "names"), [("n1\nn2\n", ["n1", "n2"]), ("n1\n-x\n", []), ("n1\na;b\n", []), ("", [])])
def test_names_of_nodes_are_checked(out: str, names: list[str]) -> None:
    assert Slurm("7", Fake(Answer(0, out, ""))).names("n[1-2]") == names


def test_steps_are_those_with_a_number() -> None:
    fake = Fake(Answer(0, "7.batch batch\n7.extern extern\n7.0 megalite-guard\n7.12 python\n", ""))
    assert Slurm("7", fake).steps() == {"0": "megalite-guard", "12": "python"}
    assert Slurm("7", Fake(TIMED_OUT)).steps() is None


def test_a_refused_requeue_tells_why() -> None:
    assert Slurm("7", Fake(Answer(0, "", ""))).requeue() == ""
    assert Slurm("7", Fake(Answer(1, "", "Job is pending execution"))).requeue() == "Job is pending execution"
    assert Slurm("7", Fake(Answer(9, "", ""))).requeue() == "scontrol ended with 9"


def test_a_command_that_is_missing_or_late_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(["no-such-command-here"]).code == 127
    monkeypatch.setattr("megalite_launch.base.slurm.ANSWER_SECONDS", 0.05)
    assert call(["sleep", "5"]).code == 124
    assert call(["printf", "%s", "$(x)"]) == Answer(0, "$(x)", "")


def test_patience_pauses_longer_and_longer_and_ends() -> None:
    pauses: list[float] = []
    assert patiently(lambda: None, pauses.append, 100.0) is None
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 9]
    answers = iter([None, None, "yes"])
    assert patiently(lambda: next(answers), pauses.append, 100.0) == "yes"


@pytest.fixture
def beat(tmp_path: Path) -> Path:
    path = tmp_path / "attempts" / "7.4.beat"
    heart = Heart(path)
    heart.stop()  # before it has begun, it leaves nothing
    assert not path.exists()
    path.parent.mkdir()
    path.touch()
    return path


def watch(beat: Path, fake: Fake, each: Callable[[int], object] = lambda look: None) -> str:
    """What the guard does. each: called at every pause, with its number."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        each(len(pauses))

    return guard(RunFolder(beat.parent.parent), Slurm("7", fake), 4, Guard(beat, 3), pause)


def shown(state: str = "RUNNING") -> Answer:
    return Answer(0, SHOWN.format(state=state, reason="None").replace("Requeue=0", "Requeue=1"), "")


def test_the_guard_requeues_a_job_without_a_supervisor(beat: Path) -> None:
    fake = Fake(shown(), Answer(0, "", ""))
    told = watch(beat, fake)
    assert told.endswith("requeued")
    assert fake.asked == [["scontrol", "show", "job", "7"], ["scontrol", "requeue", "7"]]
    (event,) = read_events(beat.parent.parent / "events.jsonl")
    assert (event["event"], event["by"], event["job"]) == ("guard", "guard", "7")


def test_the_guard_leaves_a_job_alone_that_is_ending(beat: Path) -> None:
    fake = Fake(shown("COMPLETING"))
    assert "not requeued: Slurm says that the job is COMPLETING" in watch(beat, fake)
    assert len(fake.asked) == 1


def test_the_guard_waits_for_an_answer_and_for_another_try(beat: Path) -> None:
    fake = Fake(TIMED_OUT, shown(), TIMED_OUT, shown(), Answer(0, "", ""))
    assert watch(beat, fake).endswith("requeued")
    assert [command[1] for command in fake.asked] == ["show", "show", "requeue", "show", "requeue"]


def test_the_guard_ends_with_the_supervisor(beat: Path) -> None:
    heart = Heart(beat)
    heart.start()
    assert watch(beat, Fake(TIMED_OUT), lambda look: heart.stop() if look == 2 else os.utime(beat, (look, look))) == ""
    beat.unlink()
    assert watch(beat, Fake(TIMED_OUT)) == ""  # the run folder was removed


def test_the_guard_forgives_a_supervisor_that_comes_back(beat: Path) -> None:
    def each(look: int) -> None:
        if look == 4:  # while it waits for Slurm
            os.utime(beat, (1, 1))
        if look == 6:
            beat.write_bytes(guards.END_MARK)

    assert watch(beat, Fake(TIMED_OUT), each) == ""


def test_the_heart_beats(beat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BEAT", 0.01)
    os.utime(beat, (1, 1))
    heart = Heart(beat)
    heart.start()
    look = Guard(beat, 3)
    seen = {beat.stat().st_mtime_ns for _ in range(200) if not os.utime(beat, (1, 1)) and not guards.time.sleep(0.002)}
    assert len(seen) > 1
    assert look.look() == ""
    heart.stop()
    assert look.look() == "over"
