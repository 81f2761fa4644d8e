"""Slow ranks: the rule on simulated jobs, and a run one rank of which is slowed down."""

import json
import os
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from toy_folder import launching, make_toy
from toy_jobs import one_rank
from warm_start import run

from megalite.config.layout import Layout
from megalite.distributed.health.clock import LAG, SectionClock
from megalite.distributed.mesh import Mesh
from megalite.parallel.graphed import GRAPHS
from megalite.train import stragglers
from megalite.train.stragglers import SECTIONS, WINDOW_STEPS, WINDOWS, Rule, Straggler, Stragglers, slow
from megalite_launch.base.events import read_events
from megalite_launch.base.run_folder import node_name

LAUNCH = launching("slowed", 4)
SLOWED = """
import os, sys, time
from megalite.commands.main import main
from megalite.parallel.pipeline import Pipeline
from megalite.train import stragglers

stragglers.WINDOW_STEPS = 4  # of a window: a test has not the time for 50
backward = Pipeline._backward

def slowed(self, *args):
    backward(self, *args)
    if os.environ["RANK"] == "2":
        time.sleep(0.4)  # far more than other work on this machine takes from one rank

Pipeline._backward = slowed
sys.exit(main(["train", "toy.yaml"]))
"""


def windows(generator: np.random.Generator, ranks: int, count: int, slower: float = 1.0) -> np.ndarray:
    """`[count, ranks]`: medians of windows. 5 % jitter, 2 % spikes, 1 % between hosts of 8; rank 5 is `slower`."""
    hosts = 1 + 0.01 * generator.standard_normal(ranks // 8).repeat(8)
    hosts[5] *= slower
    steps = 1 + 0.05 * generator.standard_normal((count, WINDOW_STEPS, ranks), dtype=np.float32)
    steps *= np.where(generator.random(steps.shape, dtype=np.float32) < 0.02, 3, 1)
    return np.median(steps, axis=1) * hosts


def judge(rule: Rule, medians: np.ndarray) -> list[int]:
    """The ranks named, if all sections are as slow as this."""
    seconds = {rank: (value, 2 * value, 0.1 * value, 0.0) for rank, value in enumerate(medians.tolist())}
    return [found.rank for found in rule.judge([seconds])]


def test_a_healthy_job_names_nobody_in_400_windows() -> None:
    generator, rule = np.random.default_rng(0), Rule()
    for _ in range(20):
        for medians in windows(generator, 1024, 20):
            assert judge(rule, medians) == []


@pytest.mark.parametrize(("slower", "named"), [(1.15, True), (1.05, False)])
def test_a_slow_rank_of_a_large_job_is_named_in_three_windows(slower: float, named: bool) -> None:
    found = [
        judge(rule, medians) for rule in [Rule()] for medians in windows(np.random.default_rng(1), 1024, 3, slower)
    ]
    assert found[:-1] == [[]] * (WINDOWS - 1)
    assert set(found[-1]) == ({5} if named else set())


def test_most_ranks_that_are_12_percent_slow_are_named_in_150_steps() -> None:
    found = [
        {5} == {rank for medians in windows(np.random.default_rng(seed), 256, 3, 1.12) for rank in judge(rule, medians)}
        for seed in range(20)
        for rule in [Rule()]
    ]
    assert sum(found) >= 16


def test_a_rank_is_named_once_until_it_has_been_well() -> None:
    rule, usual = Rule(), dict.fromkeys(range(4), (1.0, 2.0, 0.1, 0.0))
    bad = usual | {2: (1.0, 2.6, 0.1, 0.0)}
    named = [rule.judge([stage]) for stage in [bad] * 5 + [usual] + [bad] * 3]
    assert [bool(found) for found in named] == [False, False, True, False, False, False, False, False, True]
    assert named[2] == [Straggler(2, "backward", 1.3)]


def test_stages_are_not_compared_with_each_other() -> None:
    rule = Rule()
    stages = [{rank: (1.0 + 9 * (rank > 3), 1.0, 0.1, 0.0) for rank in ranks} for ranks in (range(4), range(4, 8))]
    assert [rule.judge(stages) for _ in range(5)] == [[]] * 5


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20), st.floats(1.0, 1e3))
def test_the_unit_of_seconds_does_not_matter(values: list[float], unit: float) -> None:
    def named(scale: float) -> list[tuple[int, str]]:
        found = slow({rank: (scale * value, scale, scale, 0.0) for rank, value in enumerate(values)})
        return [(each.rank, each.section) for each in found]

    assert named(unit) == named(1.0) or any(abs(value / other - 1.1) < 1e-6 for value in values for other in values)


@pytest.mark.parametrize("values", [[3.0], [1e-9, 1e-3, 1e-9, 1e-9]])
def test_who_has_no_peers_or_takes_no_time_is_not_slow(values: list[float]) -> None:
    assert slow({rank: (1.0, 1.0, value, 0.0) for rank, value in enumerate(values)}) == []


def test_micro_batches_as_graphs_are_in_a_step_and_nobody_is_slow_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits in them for one that comes late; what it lacks elsewhere is compared with the whole step."""
    optimizer = {0: 0.010, 1: 0.012}
    apart = {rank: (0.0, 0.0, seconds, 0.0) for rank, seconds in optimizer.items()}
    assert [found.rank for found in slow(apart)] == [1]
    assert slow({rank: (*seconds, 0.9 + 0.3 * (rank == 0)) for rank, seconds in apart.items()}) == []

    monkeypatch.setattr(stragglers, "WINDOW_STEPS", 1)
    judge = Mock(return_value=[])
    monkeypatch.setattr(Rule, "judge", judge)
    timed = Mock(stepped=lambda: {"optimizer": 0.25, GRAPHS: 4.0})
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        assert Stragglers(mesh, timed, ["node"]).stepped(loader=0.5) == []
    judge.assert_called_once_with([{0: [0.0, 0.0, 0.25, 0.5, 4.0]}])


def test_waiting_for_others_is_not_counted() -> None:
    clock = SectionClock(torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wait = dist.Work.wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.Work, "wait", lambda *args: (time.sleep(0.3), wait(*args))[1])
            with clock.running(), clock.timed("forward"):
                time.sleep(0.1)
                dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert 0.1 <= clock.stepped()["forward"] < 0.25
    assert clock.stepped() == {}
    with clock.timed("forward"):
        pass
    assert clock.stepped() == {}, "it does not run"


class LateEvent:
    """An event of a GPU that finishes a step while the host begins the second one after it."""

    step = 0  # that the host launches

    def __init__(self, **_: bool) -> None:
        self.of = -1

    def record(self) -> None:
        self.of = LateEvent.step

    def elapsed_time(self, last: "LateEvent") -> float:
        if max(self.of, last.of) > LateEvent.step - 2:
            raise RuntimeError("not ready")
        return 1e3 * self.of


def test_events_of_a_gpu_are_read_when_their_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    clock, found = SectionClock(torch.device("cuda")), []
    with clock.running():
        for LateEvent.step in range(6):
            with clock.timed("forward"):
                pass
            found.append(clock.stepped())
    assert [step for step in found if step] == [{"forward": float(step)} for step in range(6 - LAG)]


def test_collectives_of_compiled_layers_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SectionClock(torch.device("cpu"))
    wait = dist.Work.wait
    monkeypatch.setattr(dist.Work, "wait", lambda *args: (time.sleep(0.3), wait(*args))[1])

    def layer(x: torch.Tensor) -> torch.Tensor:
        summed = x + 1
        dist.all_reduce(summed, async_op=True).wait()
        return summed * 2

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compiled = torch.compile(layer, backend="eager")
        with warnings.catch_warnings(), clock.running():
            warnings.simplefilter("error", UserWarning)
            for _ in range(2):  # the first compiles
                clock.stepped()
                with clock.timed("forward"):
                    time.sleep(0.1)
                    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    finally:
        dist.destroy_process_group()
    assert 0.1 <= clock.stepped()["forward"] < 0.25


def test_a_slow_rank_of_a_run_is_named_by_its_node_and_section(tmp_path: Path) -> None:
    parallel, log = {"dp_shard": 2, "tp": 2}, {"interval": 10}
    make_toy(tmp_path, parallel=parallel, train={"steps": 13}, log=log, checkpoint={"interval": 0})
    (tmp_path / "slowed.py").write_text(SLOWED)
    environment = {  # a call that PyTorch has given another name would be a FutureWarning
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tmp_path),
        "PYTHONWARNINGS": "error::FutureWarning",
    }
    done = run(["-c", LAUNCH], 200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("event") == "straggler" and line["rank"] == 2]
    assert [(line["step"], line["section"], line["node"]) for line in found] == [(12, "backward", node_name())]
    assert found[0]["ratio"] > 1.5
    events = [event for event in read_events(tmp_path / "runs/run/events.jsonl") if event["rank"] == 2]
    assert [(event["event"], event["step"], event["section"]) for event in events] == [("straggler", 12, "backward")]
    assert f"rank 2 on {node_name()} is slow: its backward takes " in done.stdout


def test_sections_are_those_that_the_documentation_lists() -> None:
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert all(f"`{section}`" in text for section in SECTIONS)
