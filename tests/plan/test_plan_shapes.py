"""Names and shapes of a model's weights, beside the model itself and its number of parameters."""

import math
from dataclasses import replace

import pytest
import torch
from toy_jobs import MODEL, one_rank

from megalite.config.layout import Layout
from megalite.config.schema import Model
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.plan.shapes import weight_shapes
from megalite.plan.size import model_parameters

MODELS = (MODEL, replace(MODEL, qkv_bias=False, qk_norm=True, head_width=6), replace(MODEL, tie_embeddings=True))


@pytest.mark.parametrize("model", MODELS)
def test_they_are_those_of_the_model(model: Model) -> None:
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        decoder = Decoder(model, mesh.root["tp"], range(model.layers))
    assert weight_shapes(model) == {name: tuple(param.shape) for name, param in decoder.named_parameters()}
    assert sum(map(math.prod, weight_shapes(model).values())) == model_parameters(model).total
