"""Names, shapes and roles of a model's weights, beside the model itself and its number of parameters."""

import math
from dataclasses import replace

import pytest
import torch
from toy_jobs import MODEL, one_rank

from megalite.config.layers import targets_of
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Experts, Latent, Model
from megalite.config.schema import Optim
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import parameters
from megalite.plan.model.optimizer_states import uses_muon
from megalite.plan.model.size import model_parameters
from megalite.plan.model.weights import weights
from megalite.plan.parts.adapted import target
from megalite.plan.parts.part import Weight

MODELS = (
    MODEL,
    replace(MODEL, qkv_bias=False, qk_norm=True, head_width=6),
    replace(MODEL, tie_embeddings=True, out_bias=True),
    replace(MODEL, kv_heads=2, head_width=6, norm="post", qk_norm=True, qk_norm_width="all"),
)


def test_biases_and_sinks_are_no_matrices_though_experts_have_a_row_each() -> None:
    """Weight decay and Muon leave them alone."""
    experts = Experts(8, 2, biases=True)
    model = replace(MODEL, qkv_bias=True, out_bias=True, attention=Attention(sinks=True), experts=experts)
    vectors = {name for name in weights(model) if "norm" in name or name.endswith((".bias", ".sinks"))}
    roles = {name: weight.role for name, weight in weights(model).items()}
    assert {name for name, role in roles.items() if not role.decays} == vectors
    assert not {name for name, role in roles.items() if uses_muon(Optim("muon"), role)} & vectors
    assert len(vectors) == 1 + model.layers * (2 + 4 + 1 + 4)


@pytest.mark.parametrize("model", MODELS)
def test_they_are_those_of_the_model(model: Model) -> None:
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        decoder = Decoder(model, mesh.root["tp"], range(model.layers))
    found = {name: Weight(shape, role) for name, _, role, shape in parameters(decoder)}
    assert weights(model) == found
    assert list(found) == [name for name, _ in decoder.named_parameters()]
    assert sum(math.prod(weight.shape) for weight in found.values()) == model_parameters(model).total


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, attention=Attention(latent=Latent(7, 5, 4))),
        replace(MODEL, attention=Attention(latent=Latent(None, 5, 4)), experts=Experts(4, 2)),
        replace(MODEL, experts=Experts(4, 2, shared_width=8)),
        replace(MODEL, experts=Experts(4, 2, first_dense=1)),
    ],
)
def test_targets_of_a_model_are_those_of_its_matrices(model: Model) -> None:
    there = {target(name, weight) for name, weight in weights(model).items()} - {None}
    assert sorted(targets_of(model)) == sorted(there)
