"""Dropout that hangs on the seed, the token, the feature and the layer alone."""

from dataclasses import replace

import pytest
import torch
from toy_jobs import config_of, make, one_rank

from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter
from megalite.data.loader import Micros
from megalite.parallel.dropout import Dropout, dropping
from megalite.parallel.tensor import Linear
from megalite.train.step import evaluate, gradients

NUMBERS = torch.arange(40).view(8, 5) * 7


def dropped(x: torch.Tensor, name: str = "0/layer", **changes: object) -> torch.Tensor:
    settings = {"rate": 0.25, "width": x.shape[-1], "rank": 0, "split": False, **changes}
    with dropping(NUMBERS):
        return Dropout(name=name, **settings)(x)  # type: ignore[arg-type]


def test_a_share_of_features_is_dropped_and_others_make_up_for_it() -> None:
    x = torch.ones(8, 5, 4000, dtype=torch.float64)
    made = dropped(x)
    assert set(made.unique().tolist()) == {0.0, 1 / 0.75}
    assert float((made == 0).double().mean()) == pytest.approx(0.25, abs=5e-3)
    assert float((made == 0).double().mean(0).std()) == pytest.approx((0.25 * 0.75 / 8) ** 0.5, rel=0.05)


def test_parts_drop_what_the_whole_does() -> None:
    x = torch.randn(8, 5, 24, dtype=torch.float64)
    whole = dropped(x)
    columns = [dropped(part, width=24, rank=rank, split=True) for rank, part in enumerate(x.chunk(3, -1))]
    assert torch.cat(columns, -1).equal(whole)
    rows = [dropped(part, rank=rank) for rank, part in enumerate(x.chunk(4))]
    assert torch.cat(rows).equal(whole)
    assert not dropped(x, "0/another").equal(whole)
    assert not dropped(x, "1/layer").equal(whole)


def test_gradients_are_dropped_alike() -> None:
    x = torch.randn(8, 5, 6, dtype=torch.float64, requires_grad=True)
    made = dropped(x)
    made.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, made)


def test_nothing_is_dropped_outside_of_training() -> None:
    x = torch.randn(8, 5, 6)
    assert Dropout(0.5, 6, 0, False)(x) is x
    losses, evaluated = set(), set()
    with one_rank():
        for rate in (0.0, 0.5):
            config = replace(config_of(Layout()), adapter=Adapter(rank=4, alpha=50.0, dropout=rate))
            job = make(config)
            for _, param in job.named_parameters():
                if param.requires_grad:
                    param.to_local().data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
            drops = [each.lora_dropout for each in job.stages[0].modules() if isinstance(each, Linear)]
            names = [each.name for each in drops if each is not None]
            assert len(set(names)) == len(names) == (14 if rate else 0)
            batch = random_batch(job, 0)
            evaluated.add(evaluate(job, [batch]))
            losses.add(float(gradients(job, batch)))
            if rate:  # other samples drop other features
                other = Micros(batch.tokens, batch.documents, ids=torch.arange(8).view(batch.tokens.shape[:2]) + 1000)
                assert float(gradients(job, other)) not in losses
    assert len(losses) == 2
    assert len(evaluated) == 1
