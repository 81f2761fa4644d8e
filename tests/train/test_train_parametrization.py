"""Training with a parametrization: nothing changes at the base's sizes, and rates, resuming and words do elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_jobs import MODEL, advance, config_of, load_and_train, make, one_rank, train_and_save

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.model_schema import Base, Model
from megalite.config.schema import Config, Muon
from megalite.optim.interface import rate_of
from megalite.optim.rate import learning_rate

AT_BASE = {"base": Base(MODEL.width, MODEL.layers, MODEL.head_size)}
LARGER = {"base": Base(MODEL.width // 4, 1, 1)}


def configured(model: Model, **changes: Any) -> Config:
    made = config_of(Layout(), model)
    return replace(made, **changes)


def weights(job: Any) -> dict[str, Tensor]:
    return {name: param.full_tensor().detach().clone() for name, param in job.named_parameters()}


@pytest.mark.parametrize("kind", ["mup", "completep"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw on the host"])
def test_at_the_base_all_bits_are_those_of_the_standard(kind: Any, precision: Any, optimizer: str) -> None:
    """Losses of several steps and weights. CompleteP's projections into the stream begin larger, and are made equal."""
    plain = config_of(Layout())
    optim = replace(plain.optim, name=optimizer.split()[0], placement="host" if "host" in optimizer else "device")
    plain = replace(plain, train=replace(plain.train, precision=precision), optim=optim)
    same = replace(plain, model=replace(plain.model, parametrization=kind, **AT_BASE))
    with one_rank():
        one, other = make(plain), make(same)
        if kind == "completep":
            mine = dict(one.named_parameters())
            for name, param in other.named_parameters():
                if not torch.equal(param.to_local(), mine[name].to_local()):
                    assert name.endswith(("attention.o.weight", "mlp.down.weight"))
                    param.data.to_local().copy_(mine[name].data.to_local())
        assert advance(one, 0, 4) == advance(other, 0, 4)
        after = weights(other)
        assert all(torch.equal(weight, after[name]) for name, weight in weights(one).items())


@pytest.mark.parametrize("kind", ["mup", "completep"])
def test_each_parameter_has_the_rate_of_its_role_in_every_step(kind: Any) -> None:
    """Of AdamW, whose first step changes every element by about the rate, if nothing decays and ε is small."""
    model = replace(MODEL, parametrization=kind, **LARGER)
    config = configured(model)
    config.optim = replace(config.optim, weight_decay=0.0, eps=1e-20)
    with one_rank():
        job = make(config)
        before = weights(job)
        advance(job, 0, 1)
        rate = learning_rate(config.schedule, config.optim.lr, config.train.steps, 0)
        assert rate_of(job.optimizer) == rate
        for name, weight in weights(job).items():
            changes = (weight - before[name]).abs()
            hidden = name.startswith("layers.") and weight.ndim == 2
            trained = changes[changes > 0]
            assert trained.median() == pytest.approx(rate / 4 if hidden else rate, rel=1e-6), name


def test_a_run_with_factors_resumes_to_the_bit(tmp_path: Path) -> None:
    model = replace(MODEL, parametrization="completep", **LARGER, embedding_multiplier=2.0)
    config = configured(model)
    config.optim = replace(config.optim, name="muon", muon=Muon(scale="spectral"))
    with one_rank():
        losses, whole = train_and_save(config, tmp_path, 2, 5)
        _, _, again, resumed = load_and_train(config, tmp_path / "step-00000002", 5)
        assert again == losses[2:]
        assert all(torch.equal(part.values, resumed[name].values) for name, part in whole.items())
        other = replace(config, model=replace(model, base=replace(LARGER["base"], width=8)))
        with pytest.raises(InputError, match=r"model.base.width = 8: the checkpoint .* has 4"):
            load_and_train(other, tmp_path / "step-00000002", 5)
