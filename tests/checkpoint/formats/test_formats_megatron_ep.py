"""Megatron-LM's older format with folders of expert-parallel ranks: read, or refused with one message."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_files import MIXED, changed, random_weights, read, same, write_legacy

from megalite.base.errors import InputError
from megalite.checkpoint.weights.formats import megatron

FIRST_OF_EXPERTS = "iter_0000010/mp_rank_00_000_000/model_optim_rng.pt"
EP = {  # tensor-parallel size, pipeline ranks, virtual stages, expert-parallel size, whether tp divides experts too
    "experts alone": (1, 1, 1, 2, True),
    "and pipeline ranks": (1, 2, 2, 3, True),
    "and parts of each": (2, 1, 1, 2, True),
    "and parts of each, and pipeline ranks": (2, 2, 1, 6, True),
    "whole experts on tensor-parallel ranks": (2, 1, 1, 2, False),
    "whole experts on some of more ranks": (2, 2, 1, 6, False),
    "fewer than tensor-parallel ranks": (4, 1, 1, 2, False),
}


@pytest.mark.parametrize("local", [True, False], ids=["one by one", "grouped"])
@pytest.mark.parametrize("case", EP)
@pytest.mark.parametrize("name", ["experts", "experts after a dense layer", "experts beside a shared one"])
def test_ranks_with_other_experts_are_read(name: str, case: str, local: bool, tmp_path: Path) -> None:
    tp, pp, virtual, ep, split = EP[case]
    ours = random_weights(MIXED[name])
    write_legacy(tmp_path, MIXED[name], ours, tp, pp, virtual, local, ep, split)
    found = megatron.open_folder(tmp_path)
    assert found.model == MIXED[name]
    assert same(read(found), ours)


EXPERTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing rank": (
        lambda path: shutil.rmtree(path / "iter_0000010/mp_rank_01_001_001"),
        r"mp_rank_01_001_001 is missing: there are 7 of 2 · 2 · 2 ranks",
    ),
    "parts of another number of ranks": (
        lambda path: changed(path, lambda c: setattr(c["args"], "expert_tensor_parallel_size", 4), FIRST_OF_EXPERTS),
        "expert_tensor_parallel_size = 4: must be 1 or tensor_model_parallel_size = 2",
    ),
    "an expert too few": (
        lambda path: changed(
            path, lambda c: c["model"].pop("decoder.layers.0.mlp.experts.linear_fc2.weight2"), FIRST_OF_EXPERTS
        ),
        r"lacks decoder\.layers\.0\.mlp\.experts\.linear_fc2\.weight2",
    ),
    "more experts than there are": (
        lambda path: changed(path, lambda c: setattr(c["args"], "num_experts", 60_000), FIRST_OF_EXPERTS),
        "has 12 tensors of experts, fewer than its 30,000 experts",
    ),
    "experts that ranks cannot share out": (
        lambda path: changed(path, lambda c: setattr(c["args"], "num_experts", 5), FIRST_OF_EXPERTS),
        "has the experts of one of 2 ranks, which do not divide 5",
    ),
    "transposed experts": (
        lambda path: changed(
            path,
            lambda c: c["model"].update({"decoder.layers.0.mlp.experts.weight1": torch.zeros(16, 48)}),
            FIRST_OF_EXPERTS,
        ),
        r"has decoder\.layers\.0\.mlp\.experts\.weight1, matrices of all experts transposed; save it as torch_dist",
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_damaged_experts_are_refused(case: str, tmp_path: Path) -> None:
    write_legacy(tmp_path, MIXED["experts"], random_weights(MIXED["experts"]), 2, 2, ep=2)
    damage, told = EXPERTS[case]
    damage(tmp_path)
    with pytest.raises(InputError, match=told):
        megatron.open_folder(tmp_path)


def test_ranks_of_experts_that_are_tensor_parallel_ranks_may_not_be_missing(tmp_path: Path) -> None:
    """Where not all combinations are there, each tensor-parallel rank and all experts must be."""
    write_legacy(tmp_path, MIXED["experts"], random_weights(MIXED["experts"]), 2, ep=6, split=False)
    for place in sorted((tmp_path / "iter_0000010").iterdir()):
        kept = place.rename(tmp_path / "kept")
        with pytest.raises(InputError, match=r"mp_rank_.* is missing: there are 5 of 2 · 1 · 6 ranks"):
            megatron.open_folder(tmp_path)
        kept.rename(place)
    assert same(read(megatron.open_folder(tmp_path)), random_weights(MIXED["experts"]))
