"""Names, shapes and roles of a model's weights, beside the model itself and its number of parameters."""

import math
from dataclasses import replace

import pytest
import torch
from toy_jobs import MODEL, one_rank

from megalite.config.layout import Layout
from megalite.config.schema import Model
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import parameters
from megalite.plan.model.size import model_parameters
from megalite.plan.model.weights import weights
from megalite.plan.parts.part import Weight

MODELS = (
    MODEL,
    replace(MODEL, qkv_bias=False, qk_norm=True, head_width=6),
    replace(MODEL, tie_embeddings=True, out_bias=True),
    replace(MODEL, kv_heads=2, head_width=6, norm="post", qk_norm=True, qk_norm_width="all"),
)


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
