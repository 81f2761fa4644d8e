from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.plan.model.size import by_stage, head_forward_flops
from megalite.plan.split import _uneven, balance, layer_costs, layers_of, split_of


def costs(model: Model, split: list[int]) -> list[int]:
    """Forward cost of every stage, the most expensive first."""
    each = [count * layer_costs(model)[0] for count in split]
    each[-1] += head_forward_flops(model)
    return sorted(each, reverse=True)


def every_split(layers: int, pp: int) -> list[list[int]]:
    """All splits in which every stage has work: only the first and the last, with embedding and head, may be bare."""
    candidates = product(range(layers + 1), repeat=pp)
    return [list(split) for split in candidates if sum(split) == layers and 0 not in split[1:-1]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, int]:
    layers = draw(st.integers(1, 7))
    # Vocabularies from nothing to several layers' worth of work.
    vocab_size = draw(st.sampled_from([1, 500, 1664, 3328, 6000, 50_000]) | st.integers(1, 20_000))
    return Model(layers=layers, vocab_size=vocab_size), draw(st.integers(1, min(layers, 4)))


@given(cases())
def test_no_split_has_cheaper_stages(case: tuple[Model, int]) -> None:
    model, pp = case
    split = balance(model, pp)
    assert len(split) == pp
    assert split in every_split(model.layers, pp)
    assert costs(model, split) == min(costs(model, other) for other in every_split(model.layers, pp))


@given(cases())
def test_of_equal_stages_the_earlier_has_no_more_layers(case: tuple[Model, int]) -> None:
    split = balance(*case)[:-1]
    assert split == sorted(split)


def test_known_splits() -> None:
    llama3_8b = Model(32, 4096, 32, 8, None, 14336, 128256, 8192)
    assert balance(llama3_8b, 1) == [32]
    assert balance(llama3_8b, 4) == [8, 9, 9, 6]
    llama3_405b = Model(126, 16384, 128, 8, None, 53248, 128256, 8192)
    assert balance(llama3_405b, 16) == [7, *[8] * 14, 7]
    assert balance(Model(layers=4, vocab_size=1_000_000), 4) == [1, 1, 2, 0]


@pytest.mark.parametrize("pp", [0, 5])
def test_more_stages_than_layers_are_refused(pp: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot be split into {pp} stages"):
        balance(Model(layers=4), pp)


def test_an_explicit_split_is_taken_as_it_is() -> None:
    config = Config()
    config.parallel.pp = 2
    assert split_of(config) == [2, 2]
    config.parallel.pipeline.split = [1, 3]
    assert split_of(config) == [1, 3]
    assert split_of(config) is not config.parallel.pipeline.split


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_every_layer_lives_on_one_stage_in_order(split: list[int]) -> None:
    stages = layers_of(split)
    assert [len(stage) for stage in stages] == split
    assert [layer for stage in stages for layer in stage] == list(range(sum(split)))


@given(cases())
def test_layers_go_one_by_one_to_the_stage_that_is_cheapest_so_far(case: tuple[Model, int]) -> None:
    model, stages = case
    split = [int(stage < stages - 1) for stage in range(stages)]
    for _ in range(model.layers - sum(split)):
        costs = [count * layer_costs(model)[0] for count in split]
        costs[-1] += head_forward_flops(model)
        split[min(range(stages), key=lambda stage: (costs[stage], -stage))] += 1
    assert balance(model, stages) == split


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(2, 4))
def test_layers_that_differ_are_split_such_that_the_slowest_stage_is_as_fast_as_can_be(
    costs: list[int], head: int, stages: int
) -> None:
    stages = min(stages, len(costs))
    if stages < 2:
        return

    def slowest(split: list[int]) -> int:
        each = [sum(part) for part in by_stage(costs, split)]
        each[-1] += head
        return max(each)

    possible = [
        list(split)
        for split in product(range(len(costs) + 1), repeat=stages)
        if sum(split) == len(costs) and 0 not in split[:-1]
    ]
    found = _uneven(costs, head, stages)
    assert found in possible
    assert slowest(found) == min(map(slowest, possible))
