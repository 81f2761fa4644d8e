"""All formats together: from a Hugging Face folder into Megatron's and Meta's, and from one of these into another."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import SMALL, Ours, random_weights, read, same

from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import megatron, meta, torch_dist
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.output import OutputPlan
from megalite.checkpoint.weights.maps.families import family_of
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.checkpoint.weights.sources import kind_of, open_weights
from megalite.config.model_schema import Model, RopeScaling

save_file = pytest.importorskip("safetensors.torch").save_file

LLAMA = replace(SMALL, head_width=None, width=32, vocab_size=256)
MODELS = {
    "llama": LLAMA,
    "scaled": replace(LLAMA, rope_theta=500_000.0, sequence_length=131_072, rope_scaling=RopeScaling(factor=32.0)),
    "tied": replace(LLAMA, tie_embeddings=True),
    "qwen3": replace(SMALL, qk_norm=True, tie_embeddings=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
}
SPLITS = [(tp, pp, virtual) for tp in (1, 2, 4) for pp, virtual in ((1, 1), (2, 1), (2, 2))]
TARGETS: dict[str, Callable[[Weights], OutputPlan]] = {
    **{"megatron tp{} pp{} v{}".format(*split): partial(megatron.plan, split=Split(*split)) for split in SPLITS},
    **{f"megatron-dist tp{tp}": partial(torch_dist.plan, split=Split(tp)) for tp in (1, 2, 4)},
    **{f"meta {files}": partial(meta.plan, files=files) for files in (1, 2)},
}


def hugging_face(path: Path, model: Model, ours: Ours) -> None:
    """A folder of transformers whose tensors are ours, one by one."""
    family = family_of(model)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(family.config(model, "bfloat16")))
    (path / "tokenizer.json").write_text("{}")
    (path / "notes").write_text("that belong to nobody")
    table = family.table(model)
    assert all(len(theirs.strips) == 1 for theirs in table.values())
    save_file({name: ours[theirs.strips[0].name] for name, theirs in table.items()}, path / "model.safetensors")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_from_a_hugging_face_folder_and_onwards(model: Model, target: str, tmp_path: Path) -> None:
    if target.startswith("meta") and (model.qk_norm or model.qkv_bias):
        pytest.skip("an original Llama has neither norms of heads nor biases")
    ours = random_weights(model, torch.bfloat16)
    hugging_face(tmp_path / "hf", model, ours)
    source = open_weights(f"hf:{tmp_path / 'hf'}")
    convert(source, TARGETS[target](source), tmp_path / "there", {})
    assert kind_of(tmp_path / "there") == target.split()[0]
    found = open_weights(str(tmp_path / "there"))
    assert (found.model, found.family, found.dtype) == (source.model, source.family, "bfloat16")
    assert same(read(found), ours)
    assert [file.name for file in found.companions] == ["config.json", "tokenizer.json"]
    assert [file.read_bytes() for file in found.companions] == [file.read_bytes() for file in source.companions]
    convert(found, torch_dist.plan(found), tmp_path / "onwards", {})
    onwards = open_weights(str(tmp_path / "onwards"))
    assert onwards.model == model
    assert same(read(onwards), ours)
    assert [file.name for file in onwards.companions] == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("plan", [megatron.plan, torch_dist.plan])
def test_weights_are_rounded_once(plan: Any, dtype: str, tmp_path: Path) -> None:
    ours = random_weights(LLAMA)
    save = tmp_path / "hf"
    hugging_face(save, LLAMA, ours)
    source = open_weights(str(save))
    convert(source, plan(source, Split(2), dtype), tmp_path / "there", {})
    found = open_weights(str(tmp_path / "there"))
    assert found.dtype == dtype
    assert same(read(found), {name: tensor.to(getattr(torch, dtype)) for name, tensor in ours.items()})


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", LLAMA, random_weights(LLAMA))
    source = open_weights(str(tmp_path / "hf"))
    with pytest.raises(
        ValueError, match="weights in float64: Megatron has them in float32, bfloat16 or float16; use --dtype fp32"
    ):
        megatron.plan(source, Split(), "float64")
