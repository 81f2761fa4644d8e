"""Splits of the layers that even out memory."""

from dataclasses import replace
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.plan.automatic import least_of
from megalite.plan.memory.fit import peak_bytes
from megalite.plan.memory.peak import rank_memory
from megalite.plan.memory.rebalance import flatter_split

ROOT = Path(__file__).parents[2]


def flattened(config: Config) -> tuple[list[int], int] | None:
    return flatter_split(config, [rank_memory(config, pp) for pp in range(config.parallel.pp)])


def test_a_split_that_cannot_keep_to_a_limit_is_none() -> None:
    keys = ["parallel.pp=4", "parallel.pipeline.schedule=auto", "parallel.data.mode=ddp", "batch.global=8"]
    config = check(load([str(ROOT / "configs/model/llama3.2_1b.yaml")], [*keys, "train.recompute=selective"]))
    pipeline = replace(config.parallel.pipeline, memory=1.001 * max(least_of(config)) / 2**30)
    tight = replace(config, parallel=replace(config.parallel, pipeline=pipeline))
    assert flattened(config) is not None
    assert flattened(tight) is None or flattened(tight) != flattened(config)


def with_split(config: Config, split: list[int]) -> Config:
    pipeline = replace(config.parallel.pipeline, split=split)
    return check(replace(config, parallel=replace(config.parallel, pipeline=pipeline)))


@settings(max_examples=25)
@example(2, 3, "1f1b", "none", 256)  # for these, and a fifth of all, there is one
@example(2, 3, "zbv", "none", 65536)
@example(4, 6, "interleaved_1f1b", "none", 65536)
@example(3, 1, "zb_h2", "full", 256)  # the rank in the middle holds another message
@given(
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from(["1f1b", "gpipe", "zb_h2", "zbv", "interleaved_1f1b"]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([256, 65536]),
)
def test_a_proposed_split_is_valid_and_has_the_peak_it_promises(
    pp: int, more: int, schedule: str, recompute: str, vocabulary: int
) -> None:
    config = check(
        load(
            [],
            [
                f"parallel.pp={pp}",
                f"parallel.pipeline.schedule={schedule}",
                f"train.recompute={recompute}",
                f"model.layers={2 * pp + more}",
                f"model.vocab_size={vocabulary}",
                "batch.global=8",
            ],
        )
    )
    found = flattened(config)
    if found is not None:
        split, peak = found
        assert sum(split) == config.model.layers
        assert peak_bytes(with_split(config, split)) == peak < peak_bytes(config)


def test_12_layers_of_70b_on_two_stages() -> None:
    """The head makes the last stage slow, but not full: balanced by time, the first has more layers, and holds more."""
    sizes = ["model.layers=12", "parallel.pp=2", "parallel.dp_shard=1", "batch.global=64"]
    config = check(load([str(ROOT / "configs/model/llama3_70b.yaml")], sizes))
    found = flattened(config)
    assert found is not None
    assert found[0] == [6, 6]
    assert found[1] < 0.9 * peak_bytes(config)


def test_one_stage_has_nothing_to_give() -> None:
    assert flattened(check(load([], ["parallel.pp=1"]))) is None
