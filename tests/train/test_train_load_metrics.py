"""What a run reports of its experts."""

import math

import pytest

from megalite.train.load_metrics import WINDOW_STEPS, LoadMeter, starved_text


def test_values_are_of_the_interval_by_layer_and_of_the_worst_layer() -> None:
    meter = LoadMeter([1, 3])
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


def test_experts_that_starve_are_told_once_and_again_after_they_have_recovered() -> None:
    meter = LoadMeter([2, 5])
    even, hungry = [5, 5, 5, 5], [10, 0, 10, 0]
    loads = [[*even, *even], [*even, *hungry], [*even, *hungry], [*hungry, *even], [*even, *hungry]]
    told = [[meter.add(load) for _ in range(WINDOW_STEPS)] for load in loads]
    assert all(not any(each[:-1]) for each in told)
    assert [each[-1] for each in told] == [{}, {5: [1, 3]}, {}, {2: [1, 3]}, {5: [1, 3]}]
    assert starved_text(told[1][-1]).startswith("experts starve, layer 5: 1, 3: less than 10% of an even share")
    many = starved_text({layer: [0] for layer in range(11)})
    assert "layer 7: 0, and in 3 more layers: less" in many


def test_a_model_without_experts_has_no_such_values() -> None:
    meter = LoadMeter([])
    assert meter.add(()) == {}
    assert meter.read() == {}
