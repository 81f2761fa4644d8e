"""Where a run's time went: every microsecond is in one account, and in the right one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite_launch.watch.ledger import ACCOUNTS, SECOND, Ledger, nothing

TIMES = st.integers(0, 10**10)
STEPS = st.integers(0, 60)
ROUNDING = 2  # microseconds a call
CALLS: list[st.SearchStrategy[tuple[str, tuple[object, ...]]]] = [
    st.tuples(st.just("submitted"), st.tuples(TIMES)),
    st.tuples(st.just("job_began"), st.tuples(TIMES)),
    st.tuples(st.just("attempt_began"), st.tuples(TIMES, st.just("1.0.0"), st.just(["n1"]), st.just(8), STEPS)),
    st.tuples(
        st.just("attempt_ended"),
        st.tuples(TIMES, st.sampled_from(["crash", "stopped", "finished"]), st.none(), st.none(), STEPS),
    ),
    st.tuples(st.just("job_ended"), st.tuples(TIMES)),
    st.tuples(st.just("resumed"), st.tuples(TIMES, STEPS)),
    st.tuples(st.just("rolled_back"), st.tuples(TIMES, STEPS)),
    st.tuples(st.just("evaluated"), st.tuples(TIMES, STEPS)),
    st.tuples(st.just("saved"), st.tuples(TIMES, STEPS, TIMES)),
    st.tuples(st.just("training_ended"), st.tuples(TIMES, STEPS, st.booleans())),
]
BEGAN_LATER = "attempt_began", (0, "1.0.0", ["n1"], 8, 1)  # at a step that its first record falls short of
RECORD = st.tuples(st.just("record"), st.tuples(TIMES, STEPS, st.integers(1, 10**9), st.just(1.0), st.just(1.0)))


@settings(max_examples=300)
@example([BEGAN_LATER, ("record", (0, 0, 1, 1.0, 1.0)), ("job_ended", (0,))], False, 0, False)
@given(
    st.lists(st.one_of(RECORD, RECORD, RECORD, *CALLS), max_size=60),
    st.booleans(),
    st.none() | STEPS,
    st.booleans(),
)
def test_accounts_add_up_to_the_time_whatever_is_told(
    calls: list[tuple[str, tuple[int, ...]]], ordered: bool, checkpoint: int | None, living: bool
) -> None:
    ledger, now = Ledger(), 10**10 + 5
    if ordered:
        calls = [
            (name, (time, *rest))
            for (name, (_, *rest)), time in zip(calls, sorted(given[0] for _, given in calls), strict=True)
        ]
    for name, given_ in calls:
        getattr(ledger, name)(*given_)
        assert sum(ledger.spent.values()) == ledger.cursor - (ledger.began or 0)
        assert min(ledger.spent.values()) >= 0
    spent, end = ledger.accounts(now, living, checkpoint)
    if ledger.began is None:
        assert spent == nothing()
        return
    assert sum(spent.values()) == end - ledger.began
    assert min(spent.values()) >= 0
    assert end == now or not living
    assert sum(ledger.took) == ledger.spent["training"]
    for account in set(ACCOUNTS) - {"waiting", "restarting"}:
        assert sum(part.spent[account] for part in ledger.parts) == ledger.spent[account]
    assert sum(part.spent["restarting"] for part in ledger.parts) <= ledger.spent["restarting"]
    assert list(ledger.steps) == sorted(ledger.steps)


@dataclass
class History:
    """A run that is made up, which keeps its own accounts. Times are microseconds, steps take whole milliseconds."""

    random: Random
    supervised: bool
    now: int = 10**15
    truth: dict[str, int] = field(default_factory=nothing)
    calls: list[tuple[int, Callable[[Ledger], object]]] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # times of steps that are not saved

    def tell(self, call: Callable[[Ledger, int], object]) -> None:
        now = self.now
        self.calls.append((now, lambda ledger: call(ledger, now)))

    def passes(self, amount: int, account: str) -> None:
        self.now += amount
        self.truth[account] += amount

    def between(self, least: int, most: int) -> int:
        return self.random.randint(least * 1000, most * 1000)

    def job(self, first: bool, attempts: int, last: bool) -> None:
        if first:
            self.tell(lambda ledger, now: ledger.submitted(now))
        self.passes(self.between(1000, 10**6), "waiting")
        self.tell(lambda ledger, now: ledger.job_began(now))
        for number in range(attempts):
            self.attempt(f"1.0.{number}", last and number == attempts - 1)
        self.passes(self.between(0, 500), "restarting")
        self.tell(lambda ledger, now: ledger.job_ended(now))

    step = saved = 0
    starts = 0

    def attempt(self, name: str, well: bool) -> None:
        random, saved = self.random, self.saved
        self.passes(self.between(10, 60_000), "restarting")
        self.tell(lambda ledger, now: ledger.attempt_began(now, name, ["n1", "n2"], 8, saved))
        self.passes(self.between(10, 60_000), "restarting")
        self.step = saved
        if self.starts:
            self.tell(lambda ledger, now: ledger.resumed(now, saved))
            self.passes(self.between(10, 60_000), "restarting")
        steps, pace = random.randint(1, 30), self.between(100, 2000)
        every, save_every = random.randint(1, 4), random.randint(2, 9)
        self.starts += 1
        for at in range(steps):
            self.one_step(pace, every if at else 1, save_every)
        if well:
            if self.step % every:
                self.report(pace)
            step = self.step
            self.truth["training"] += sum(self.pending)
            self.passes(self.between(1, 5000), "saving")
            self.tell(lambda ledger, now: ledger.training_ended(now, step, True))
        else:
            self.passes(self.between(0, 90_000), "lost")
            self.truth["lost"] += sum(self.pending)
        self.pending = []
        cause, step = ("finished" if well else "crash"), self.saved
        self.tell(lambda ledger, now: ledger.attempt_ended(now, cause, None, None, step))

    def one_step(self, pace: int, every: int, save_every: int) -> None:
        self.now += pace
        self.step += 1
        step = self.step
        self.pending.append(pace)
        if step % every == 0:
            self.report(pace)
        if self.random.random() < 0.1:
            self.passes(self.between(100, 5000), "evaluating")
            self.tell(lambda ledger, now: ledger.evaluated(now, step))
        if step % save_every == 0:
            blocked = self.between(1, 3000)
            self.passes(blocked, "saving")
            self.tell(lambda ledger, now: ledger.saved(now, step, blocked))
            self.saved = step
            self.truth["training"] += sum(self.pending)
            self.pending = []

    def report(self, pace: int) -> None:
        step = self.step
        self.tell(lambda ledger, now: ledger.record(now, step, pace, 2.0, pace / SECOND))


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4))
def test_a_run_that_is_known_is_told_as_it_was(seed: int, jobs: int, attempts: int) -> None:
    history, ledger = History(Random(seed), True), Ledger()
    began = history.now
    for job in range(jobs):
        history.job(job == 0, attempts, job == jobs - 1)
    for _, call in history.calls:
        call(ledger)
    spent, end = ledger.accounts(history.now, True, history.saved)
    assert end - began == sum(history.truth.values()) == sum(spent.values())
    assert len(ledger.parts) == jobs * attempts
    for account in ACCOUNTS:
        assert abs(spent[account] - history.truth[account]) <= ROUNDING * len(history.calls), account


def told(*calls: tuple[object, ...]) -> Ledger:
    """A ledger of calls: name, seconds, and the rest."""
    ledger = Ledger()
    for name, time, *rest in calls:
        getattr(ledger, str(name))(int(float(str(time)) * SECOND), *rest)
    return ledger


def seconds(ledger: Ledger, now: float, living: bool = True, checkpoint: int | None = None) -> dict[str, float]:
    spent, _ = ledger.accounts(int(now * SECOND), living, checkpoint)
    return {name: amount / SECOND for name, amount in spent.items() if amount}


def records(first: int, last: int, began: float, pace: float = 1.0) -> list[tuple[object, ...]]:
    """A record after every step."""
    return [
        ("record", began + pace * (step - first + 1), step, int(pace * SECOND), 2.0, pace)
        for step in range(first, last + 1)
    ]


BEGUN: list[tuple[object, ...]] = [
    ("submitted", 0),
    ("job_began", 100),
    ("attempt_began", 110, "1.0.0", ["n1"], 8, 0),
]


def test_an_attempt_that_goes_on() -> None:
    ledger = told(*BEGUN, *records(1, 10, 130))
    assert seconds(ledger, 141.5) == {"waiting": 100, "restarting": 30, "training": 11.5}
    assert ledger.step == 10


def test_what_is_done_again_is_lost_and_so_is_the_time_until_a_failure_is_noticed() -> None:
    crash = [("attempt_ended", 160, "crash", 1, None, 6), ("attempt_began", 163, "1.0.1", ["n1"], 8, 6)]
    ledger = told(*BEGUN, *records(1, 10, 130), *crash, ("resumed", 170, 6), *records(7, 12, 175))
    expected = {"waiting": 100, "restarting": 30 + 15, "training": 6 + 6, "lost": 4 + 20}
    assert seconds(ledger, 181) == expected
    assert ledger.lost_steps == 4
    assert ledger.parts[0].spent["lost"] == 24 * SECOND
    assert ledger.parts[1].spent["restarting"] == 15 * SECOND


def test_steps_that_were_saved_but_not_reported_count() -> None:
    """Every tenth step is reported; the checkpoint of step 15 was complete when a rank died."""
    reported = [("record", 140, 10, SECOND, 2.0, 1.0)]
    crash = [("attempt_ended", 157, "crash", 1, None, 15), ("attempt_began", 158, "1.0.1", ["n1"], 8, 15)]
    ledger = told(*BEGUN, *reported, *crash, ("resumed", 165, 15))
    assert seconds(ledger, 165) == {"waiting": 100, "restarting": 30 + 8, "training": 15, "lost": 12}
    assert ledger.lost_steps == 0


def test_a_save_and_an_evaluation_between_records() -> None:
    ledger = told(
        *BEGUN, *records(1, 2, 130), ("evaluated", 137, 2), ("saved", 140, 2, 2 * SECOND), *records(3, 4, 140)
    )
    assert seconds(ledger, 142) == {"waiting": 100, "restarting": 30, "training": 5, "evaluating": 5, "saving": 2}


def test_a_rollback_loses_its_steps() -> None:
    ledger = told(*BEGUN, *records(1, 6, 130), ("rolled_back", 137, 4), *records(5, 6, 140))
    assert seconds(ledger, 142) == {"waiting": 100, "restarting": 33, "training": 6, "lost": 3}
    assert len(ledger.parts) == 1


def test_the_end_of_a_run_is_saving() -> None:
    ledger = told(
        *BEGUN,
        *records(1, 4, 130),
        ("training_ended", 140, 4, True),
        ("attempt_ended", 141, "finished", 0, None, 4),
        ("job_ended", 142),
    )
    assert seconds(ledger, 142) == {"waiting": 100, "restarting": 31, "training": 4, "saving": 7}


def test_a_job_that_vanished_waited_since_it_was_last_heard_of() -> None:
    ledger = told(*BEGUN, *records(1, 4, 130), ("job_began", 500), ("attempt_began", 510, "1.1.0", ["n2"], 8, 2))
    assert seconds(ledger, 510) == {"waiting": 100 + 366, "restarting": 30 + 10, "training": 4}
    ledger.resumed(520 * SECOND, 2)
    assert seconds(ledger, 520) == {"waiting": 466, "restarting": 50, "training": 2, "lost": 2}


def test_a_record_that_arrives_after_the_end_of_its_attempt_belongs_to_it() -> None:
    late = [("attempt_ended", 134.5, "crash", 1, None, 0), *records(1, 5, 130)[4:]]
    ledger = told(
        *BEGUN, *records(1, 4, 130), *late, ("attempt_began", 140, "1.0.1", ["n1"], 8, 5), ("resumed", 145, 5)
    )
    assert seconds(ledger, 150) == {"waiting": 100, "restarting": 30 + 15.5, "training": 4.5}


def test_a_start_that_is_heard_of_before_its_attempt_belongs_to_it() -> None:
    """The supervisor's clock is ahead of that of the ranks."""
    crash = [("attempt_ended", 140, "crash", 1, None, 4), ("resumed", 142, 4)]
    ledger = told(
        *BEGUN, *records(1, 4, 130), *crash, ("attempt_began", 143, "1.0.1", ["n1"], 8, 4), *records(5, 6, 150)
    )
    assert [part.name for part in ledger.parts] == ["1.0.0", "1.0.1"]
    assert seconds(ledger, 152) == {"waiting": 100, "restarting": 30 + 10, "training": 6, "lost": 6}


def test_a_run_without_a_supervisor_has_starts() -> None:
    first = [*records(1, 4, 1000), ("training_ended", 1006, 4, True)]
    ledger = told(*first, ("resumed", 2000, 4), *records(5, 6, 2003), ("training_ended", 2010, 6, False))
    assert [(part.name, part.cause) for part in ledger.parts] == [("start 1", "stopped"), ("start 2", "failed")]
    expected = {"training": 6, "saving": 2, "waiting": 994, "restarting": 3, "lost": 5}
    assert seconds(ledger, 5000, living=False, checkpoint=6) == expected
    worse = seconds(ledger, 5000, living=False, checkpoint=4)
    assert worse == expected | {"training": 4, "lost": 7}


@pytest.mark.parametrize("checkpoint", [0, 3, 7, 10])
def test_what_a_dead_run_has_not_saved_is_lost(checkpoint: int) -> None:
    reported = [("record", 130 + step, step, SECOND, 2.0, 1.0) for step in (5, 10)]
    ledger = told(*BEGUN, *reported, ("attempt_ended", 142, "crash", 1, None, None), ("job_ended", 143))
    found = seconds(ledger, 143, living=False, checkpoint=checkpoint)
    assert found.get("training", 0) == checkpoint
    assert found["lost"] == 12 - checkpoint


def test_an_end_that_nobody_told_is_the_last_sign_of_life() -> None:
    ledger = Ledger()
    ledger.job_began(0)
    ledger.attempt_began(0, "a.0.0", ["n1"], 2, 0)
    ledger.record(10 * SECOND, 10, SECOND, 1.0, 1.0)
    ledger.job_began(50 * SECOND)
    ledger.attempt_began(50 * SECOND, "b.0.0", ["n1"], 2, 0)
    first, second = ledger.parts
    assert (first.ended, first.cause, second.ended) == (10 * SECOND, "", None)
    assert ledger.spent["waiting"] == 40 * SECOND


@pytest.mark.parametrize(("code", "lost"), [(3, 0), (130, 4 * SECOND)])
def test_a_second_interrupt_saves_nothing(code: int, lost: int) -> None:
    ledger = Ledger()
    ledger.job_began(0)
    ledger.attempt_began(0, "a.0.0", ["n1"], 2, 0)
    ledger.record(10 * SECOND, 10, SECOND, 1.0, 1.0)
    ledger.attempt_ended(10 * SECOND, "stopped", code, None, 6)
    ledger.job_ended(10 * SECOND)
    assert ledger.accounts(10 * SECOND, False, 6 if code == 130 else 10)[0]["lost"] == lost
