"""Layers of pipeline ranks."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite_tools.plan.published.layer_counts import stage_layers
from megalite_tools.plan.published.profiles import PROFILES
from megalite_tools.plan.published.work import Work

SMALL = Work(
    layers=16, width=2048, heads=32, kv_heads=32, head_size=64, ffn=8192, vocab=131072, sequence=4096, mode="zero1"
)


@given(st.integers(1, 200), st.integers(1, 64), st.sampled_from(sorted(PROFILES)))
def test_every_layer_has_one_rank(layers: int, pp: int, program: str) -> None:
    pp = min(pp, layers)
    found = stage_layers(replace(SMALL, layers=layers, pp=pp), PROFILES[program])
    assert len(found) == pp
    assert sum(found) == layers
    assert min(found) >= 0


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (96, 8, [12] * 8),
        (126, 16, [7, *[8] * 14, 7]),  # Llama 3: one layer less on both ends
        (78, 12, [7] * 6 + [6] * 6),
    ],
)
def test_layers_are_divided_evenly_or_the_ends_have_less(layers: int, pp: int, expected: list[int]) -> None:
    assert stage_layers(replace(SMALL, layers=layers, pp=pp), PROFILES["megatron_2025"]) == expected


def test_weighed_stages_give_the_last_rank_less_for_its_output_layer() -> None:
    """The output layer has as many parameters as four layers; the block that goes beyond the share belongs to it."""
    assert stage_layers(replace(SMALL, pp=2), PROFILES["nanotron"]) == [11, 5]
    assert stage_layers(replace(SMALL, pp=2, vocab=128), PROFILES["nanotron"]) == [9, 7]


@given(st.integers(2, 9), st.integers(2, 4), st.sampled_from([1024, 65_536, 131_072, 1_048_576]))
def test_balanced_stages_have_the_least_largest_rank(layers: int, pp: int, vocab: int) -> None:
    """Compares with all ways to divide the layers, ranks without any included."""
    work = replace(SMALL, layers=layers, pp=pp, vocab=vocab)
    end = vocab * work.width / work.layer_parameters

    def largest(each: list[int]) -> float:
        return max(each[0] + end, *each[1:-1], each[-1] + end)

    cuts = combinations(range(layers + pp - 1), pp - 1)
    ways = [[b - a - 1 for a, b in zip((-1, *cut), (*cut, layers + pp - 1), strict=True)] for cut in cuts]
    found = stage_layers(work, PROFILES["scaling"])
    assert found in ways
    assert largest(found) == pytest.approx(min(map(largest, ways)))
