"""Parameters and FLOPs of every model preset, beside the real model: its first layers, run on the meta device.

test_plan_size.py has the numbers of whole models.
"""

from collections import Counter
from dataclasses import asdict, replace
from itertools import chain
from math import prod
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toy_jobs import CPU, one_rank

from megalite.config.layout import Layout, vocabulary_rows
from megalite.config.load import load
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import extra_state, parameters
from megalite.plan.model.size import flops_per_token, model_parameters

LAYERS = 4  # after which the kinds of layers repeat in every preset
PRESETS = sorted((Path(__file__).parents[2] / "configs/model").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_parameters_and_flops_are_those_of_the_real_model(preset: Path) -> None:
    model = replace(load([str(preset)]).model, layers=LAYERS)
    # A window saves FLOPs only where blocks are left out; test_plan_size.py counts the pairs that it leaves. The kernel
    # that returns the log-sum-exp, which sinks and values of another width than keys need, is not counted on a CPU.
    # Capped scores are made for some rows at a time, with fewer hidden pairs than whole ones have.
    latent = model.attention.latent
    latent = None if latent is None else replace(latent, value_width=model.head_size)
    plain = {"window": None, "full_every": None, "window_rope_theta": None, "softcap": None, "sinks": False}
    attention = replace(model.attention, **plain, latent=latent)
    whole = replace(model, attention=attention)
    if model.experts is not None:  # without numbers, nothing can be chosen
        whole = replace(whole, experts=replace(model.experts, force_balance=True))
    with one_rank():
        mesh = Mesh.build(Layout(), CPU)
        assert mesh is not None
        found = Counter[str]()
        stage = Decoder(model, mesh.tp, range(model.layers))
        for _, _, role, shape in chain(parameters(stage), extra_state(stage)):
            found[role.component] += prod(shape)
        decoder = Decoder(whole, mesh.tp, range(model.layers)).to("meta")
        tokens = torch.zeros(model.sequence_length, 1, dtype=torch.int64, device="meta")
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            decoder(tokens)
    assert {name: count for name, count in asdict(model_parameters(model)).items() if count} == found
    padding = 2 * model.sequence_length * model.width * (vocabulary_rows(model.vocab_size, 1) - model.vocab_size)
    assert flops_per_token(whole, "full") * model.sequence_length == 3 * (counted.get_total_flops() - padding)
