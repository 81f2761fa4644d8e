"""Megatron-LM's older format, checked against files that were made from its published rules with plain torch."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron_files import MIXED, MODELS, arguments, random_weights, read, same, write_legacy

from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import megatron
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.config.model_schema import Model

SPLITS = [(tp, pp, virtual) for tp in (1, 2, 4) for pp, virtual in ((1, 1), (2, 1), (2, 2))]
ALL = MODELS | MIXED
OF_THE_RUN = {  # arguments that mean nothing for the weights
    "load",
    "betas",
    "consumed_train_samples",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
}


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "tp{}-pp{}-v{}".format(*split))
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_every_layout_is_read(model: Model, split: tuple[int, int, int], tmp_path: Path) -> None:
    ours = random_weights(model)
    write_legacy(tmp_path, model, ours, *split)
    found = megatron.open_folder(tmp_path)
    assert found.model == model
    assert same(read(found), ours)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "tp{}-pp{}-v{}".format(*split))
@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_what_is_written_is_what_megatron_would_write(
    model: Model, split: tuple[int, int, int], tmp_path: Path
) -> None:
    ours = random_weights(model)
    write_legacy(tmp_path / "theirs", model, ours)
    found = megatron.open_folder(tmp_path / "theirs")
    convert(found, megatron.plan(found, Split(*split)), tmp_path / "to", {})
    write_legacy(tmp_path / "expected", model, ours, *split)
    expected = sorted((tmp_path / "expected").glob("*/mp_rank_*/*.pt"))
    written = sorted((tmp_path / "to").glob("*/mp_rank_*/*.pt"))
    assert [file.parent.name for file in written] == [file.parent.name for file in expected]
    told = arguments(model, *split) | {"num_query_groups": model.kv_heads, "params_dtype": torch.float32}
    for file, other in zip(written, expected, strict=True):
        two = torch.load(other, weights_only=False)
        with torch.serialization.safe_globals([Namespace]):  # as later versions of Megatron load
            one = torch.load(file)
        assert {key for key, value in told.items() if vars(one["args"]).get(key) != value} <= OF_THE_RUN
        keys = [key for key in two if key.startswith("model")]
        assert [key for key in one if key.startswith("model")] == keys
        for key in keys:
            assert same(one[key], {name: tensor for name, tensor in two[key].items() if tensor is not None})
    assert same(read(megatron.open_folder(tmp_path / "to")), ours)
