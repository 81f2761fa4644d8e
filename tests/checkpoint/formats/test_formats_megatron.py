"""Megatron-LM's older format, checked against files that were made from its published rules with plain torch."""

from pathlib import Path

import pytest
import torch
from megatron_files import MODELS, Ours, random_weights, write_legacy

from megalite.checkpoint.formats import megatron
from megalite.checkpoint.formats.opened import PREFIX, Weights
from megalite.checkpoint.read import reader_of

SPLITS = [(tp, pp, virtual) for tp in (1, 2, 4) for pp, virtual in ((1, 1), (2, 1), (2, 2))]


def read(found: Weights) -> Ours:
    reader = reader_of(found)
    tensors = {
        name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in found.index.tensors.items()
    }
    reader.fill(tensors)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def same(first: Ours, second: Ours) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "tp{}-pp{}-v{}".format(*split))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_layout_is_read(model: object, split: tuple[int, int, int], tmp_path: Path) -> None:
    ours = random_weights(model)
    write_legacy(tmp_path, model, ours, *split)
    found = megatron.open_folder(tmp_path)
    assert found.model == model
    assert same(read(found), ours)
