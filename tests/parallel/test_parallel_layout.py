"""The smallest layouts in which a sum over ranks or micro-batches can be forgotten or made twice.

`tests/test_layouts.py` has every pair of features, and takes minutes; these take seconds.
"""

from dataclasses import replace

import pytest
from ranks import Ranks
from toy_jobs import MODEL, config_of

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Pipeline
from megalite.config.schema import Batch, Config


def case(layout: Layout, model: Model = MODEL, micro_batches: int = 1, schedule: str = "1f1b") -> Config:
    config = config_of(layout, model)
    parallel = replace(config.parallel, pipeline=Pipeline(schedule))
    return replace(config, parallel=parallel, batch=Batch(1, micro_batches * layout.dp))


CASES = {
    "a norm over all heads is summed over tp": case(Layout(tp=2), replace(MODEL, qk_norm=True, qk_norm_width="all")),
    "gradients are summed over cp": case(Layout(cp=2)),
    "both ends of a V are on one rank": case(
        Layout(pp=2), replace(MODEL, layers=4, tie_embeddings=True), micro_batches=4, schedule="zbv"
    ),
    "micro-batches share the tokens": case(Layout(dp_shard=2), micro_batches=3),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_of_two_ranks_trains_as_one_process(name: str, ranks: Ranks) -> None:
    found = ranks.run(compare, CASES[name], 2, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
