import pytest
from gradient_cases import Clipped, clipped
from ranks import Ranks

from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Train

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
    Layout(pp=4, tp=2),
]


def clip(ranks: Ranks, layout: Layout, tied: bool, limit: float) -> list[Clipped]:
    """Every rank's clipped gradients; the norms of q_norm and k_norm are narrower than four ranks of FSDP."""
    config = Config(
        model=Model(4, 10, 4, 2, 2, 12, 20, 8, tie_embeddings=tied, qk_norm=True, qkv_bias=True),
        parallel=Parallel(layout.pp, layout.dp_replicate, layout.dp_shard, tp=layout.tp),
        batch=Batch(1, 4),
        train=Train(precision="fp64"),
    )
    return ranks.run(clipped, config, limit)[: layout.world_size]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_norm_and_clipping_are_those_of_one_process(layout: Layout, tied: bool, ranks: Ranks) -> None:
    told = clip(ranks, layout, tied, 0.01)
    assert len({found.norm for found in told}) == 1, "the same on every rank"
    for found in told:
        assert found.misplaced == []
        assert found.norm == pytest.approx(found.expected_norm, rel=1e-13)
        assert found.norm > 0.1
        assert found.apart < 1e-15
        assert found.scale == pytest.approx(0.01 / found.norm, rel=1e-4)


def test_gradients_below_the_limit_are_left_alone(ranks: Ranks) -> None:
    for found in clip(ranks, Layout(pp=2, dp_shard=2), True, 1e3):
        assert found.scale == 1.0
        assert found.apart < 1e-15
