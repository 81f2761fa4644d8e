"""What a run reports of its experts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_runs
from toy_jobs import MODEL, config_of, one_rank

from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.schema import Config, Log, Train
from megalite.train import load_metrics
from megalite.train.load_metrics import WINDOW_STEPS, LoadMeter, starved, starved_text
from megalite.train.report import LOADS_OF_RUN, Report


def test_values_are_of_the_interval_by_layer_and_of_the_worst_layer() -> None:
    meter = LoadMeter([1, 3], 4)
    meter.add([4, 4, 4, 4, 8, 8, 0, 0])
    meter.add([4, 4, 4, 4, 8, 6, 2, 0])
    found = meter.read()
    assert meter.latest.tolist() == [[8, 8, 8, 8], [16, 14, 2, 0]]
    shares = [16 / 32, 14 / 32, 2 / 32]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    expected = {"expert_load/1": 1, "expert_entropy/1": 1, "experts_starved/1": 0}
    expected |= {"expert_load/3": 2, "expert_entropy/3": entropy, "experts_starved/3": 1}
    expected |= {"expert_load": 2, "expert_entropy": entropy, "experts_starved": 1}
    assert found == pytest.approx(expected, rel=1e-12)
    assert meter.read() == {}


def test_an_expert_starves_below_a_tenth_of_an_even_share() -> None:
    """An even one is of 100 tokens."""
    load = np.array([[200, 181, 9, 10], [200, 190, 10, 0]])
    assert starved(load).tolist() == [[False, False, True, False], [False, False, False, True]]


def test_experts_that_starve_are_told_once_and_again_after_they_have_recovered() -> None:
    meter = LoadMeter([2, 5], 4)
    even, hungry = [5, 5, 5, 5], [10, 0, 10, 0]
    loads = [[*even, *even], [*even, *hungry], [*even, *hungry], [*hungry, *even], [*even, *hungry]]
    told = [[meter.add(load) for _ in range(WINDOW_STEPS)] for load in loads]
    assert all(not any(each[:-1]) for each in told)
    assert [each[-1] for each in told] == [{}, {5: [1, 3]}, {}, {2: [1, 3]}, {5: [1, 3]}]
    assert starved_text(told[1][-1]).startswith("experts starve, layer 5: 1, 3: less than 10% of an even share")
    many = starved_text({layer: [0] for layer in range(11)})
    assert "layer 7: 0, and in 3 more layers: less" in many


def test_a_model_without_experts_has_no_such_values() -> None:
    meter = LoadMeter([], 0)
    assert meter.add(()) == {}
    assert meter.read() == {}


def test_a_run_keeps_a_hundred_loads_for_a_picture(tmp_path: Path) -> None:
    meter = LoadMeter([0, 1], 2)
    with Report(tmp_path, Config(train=Train(steps=500)), 0) as report:
        for step in range(1, 501):
            meter.add([step, 1, 1, 1])
            meter.read()
            report.load(step, meter)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == LOADS_OF_RUN + 1
    assert all(line["load"] == [[line["step"], 1], [1, 1]] and line["layers"] == [0, 1] for line in lines)


def test_a_run_tells_loads_and_experts_that_starve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_metrics, "WINDOW_STEPS", 2)
    config = config_of(Layout(), replace(MODEL, layers=2, init_std=0.5, experts=Experts(32, 1, 8, first_dense=1)))
    config = replace(config, train=replace(config.train, steps=4), log=Log(interval=2))
    with one_rank():
        notes, _, _ = toy_runs.run(config, tmp_path)
    tokens = 2 * config.batch.global_ * config.model.sequence_length
    loads = [details["load"] for _, name, details in notes.noted if name == "expert_load"]
    assert [sum(load[0]) for load in loads] == [tokens, tokens]
    for (_, record), (load,) in zip(notes.records[-2:], loads, strict=True):
        assert record["expert_load"] == record["expert_load/1"] == pytest.approx(max(load) * 32 / tokens)
    ((step, details), *_) = notes.named("experts_starved")
    assert (step, details["experts"]) == (
        2,
        {1: [expert for expert, each in enumerate(loads[0][0]) if each * 320 < tokens]},
    )
