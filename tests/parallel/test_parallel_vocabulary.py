"""Vocabularies that are padded inside, and nothing outside shows it."""

import sys
from dataclasses import replace

import pytest
from ranks import Ranks
from toy_jobs import MODEL, Parts, advance, config_of, make, one_rank, parts

from megalite.commands.verify import compare
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataParallel, Pipeline
from megalite.config.schema import Batch, Config

ODD = replace(MODEL, vocab_size=97, qkv_bias=False)  # 104 rows on one rank, 52 on each of two
TIED = replace(ODD, vocab_size=131, tie_embeddings=True)
FEW = replace(ODD, vocab_size=50)
TINY = replace(ODD, vocab_size=5)  # the last of four ranks has padding alone


def case(layout: Layout, model: Model, mode: str = "zero3", schedule: str = "1f1b") -> Config:
    model = replace(model, heads=12, kv_heads=12, head_width=4, sequence_length=24, layers=2 * layout.pp)
    parallel = replace(config_of(layout, model).parallel, pipeline=Pipeline(schedule), data=DataParallel(mode))
    return replace(config_of(layout, model), parallel=parallel, batch=Batch(1, 2 * layout.dp * layout.pp))


CASES = {
    "tp 1, two stages": case(Layout(pp=2), ODD),
    "tp 1, eight shards, tied": case(Layout(dp_shard=8), TIED, "zero2"),
    "tp 1, ddp": case(Layout(dp_replicate=2, dp_shard=2), FEW, "ddp"),
    "tp 2": case(Layout(tp=2), ODD),
    "tp 3, tied": case(Layout(tp=3), TIED),
    "tp 4, zero3": case(Layout(dp_shard=2, tp=4), FEW),
    "tp 2, tied, four shards, zero2": case(Layout(dp_shard=4, tp=2), TIED, "zero2"),
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


def trained(config: Config) -> tuple[list[float], float, Parts]:
    """Losses, the norm of all parameters, and the parameters and moments after three steps."""
    with one_rank():
        job = make(config)
        losses = advance(job, 0, 3)
        assert job.gradients is not None
        return losses, job.gradients.parameter_norm().item(), parts(job)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [ODD, FEW])
def test_training_is_that_without_padding(model: Model, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(Layout(), replace(model, tie_embeddings=tied, logits_softcap=2.0))
    padded = trained(config)
    monkeypatch.setattr(sys.modules["megalite.plan.parts.part"], "vocabulary_rows", lambda size, tp: size)
    losses, norm, expected = trained(config)
    assert padded[0] == pytest.approx(losses, rel=1e-13)
    assert padded[1] == pytest.approx(norm, rel=1e-13)
    assert padded[2].keys() == expected.keys()
    for name, part in padded[2].items():
        values = expected[name].values
        assert part.box == expected[name].box
        assert (part.values - values).abs().max() <= 1e-12 * values.abs().max(), name


def test_copies_in_bf16_have_padding_of_0() -> None:
    """`parts` looks at padding."""
    config = config_of(Layout(), FEW)
    config.train.precision = "bf16"
    assert trained(config)[1] > 0
