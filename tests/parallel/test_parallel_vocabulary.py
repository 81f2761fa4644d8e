"""A vocabulary that tensor parallelism does not divide: it is padded inside, and nothing outside shows it."""

from dataclasses import replace

import pytest
from ranks import Ranks
from toy_jobs import MODEL, config_of

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.schema import Batch, Config, DataParallel, Pipeline

ODD = replace(MODEL, vocab_size=37, qkv_bias=False)
TIED = replace(ODD, tie_embeddings=True)
TINY = replace(ODD, vocab_size=5)  # the last of four ranks has padding alone


def case(layout: Layout, model: Model, mode: str = "zero3", schedule: str = "1f1b") -> Config:
    model = replace(model, heads=12, kv_heads=12, head_width=4, sequence_length=24, layers=2 * layout.pp)
    parallel = replace(config_of(layout, model).parallel, pipeline=Pipeline(schedule), data=DataParallel(mode))
    return replace(config_of(layout, model), parallel=parallel, batch=Batch(1, 2 * layout.dp * layout.pp))


CASES = {
    "tp 2": case(Layout(tp=2), ODD),
    "tp 3, tied": case(Layout(tp=3), TIED),
    "tp 4, zero3": case(Layout(dp_shard=2, tp=4), ODD),
    "tp 2, tied, more shards than padding, zero2": case(Layout(dp_shard=4, tp=2), TIED, "zero2"),
    "tp 2, zero1, replicas": case(Layout(dp_replicate=2, dp_shard=2, tp=2), ODD, "zero1"),
    "tp 3, ddp": case(Layout(dp_shard=2, tp=3), ODD, "ddp"),
    "tp 2, both ends of a V": case(Layout(pp=2, tp=2), TIED, schedule="zbv"),
    "a rank of padding alone": case(Layout(dp_shard=2, tp=4), TINY),
    "a rank of padding alone, tied, at both ends": case(Layout(pp=2, tp=4), replace(TINY, tie_embeddings=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(name: str, ranks: Ranks) -> None:
    found = ranks.run(compare, CASES[name], 2, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
