"""Layers of multi-token prediction in files as DeepSeek-V3's: after the last layer, with copies of what they share."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_families import CASES, transformers
from safetensors.torch import load_file, save_file
from test_maps_families import TOKENS, decoder_of, distance
from torch import Tensor
from toy_jobs import one_rank

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.maps.families import FAMILIES, family_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.config.model_schema import Model, MultiToken
from megalite.parallel.parameter import part

FILE, SHARED = "model.safetensors", ("embed_tokens.weight", "shared_head.head.weight")


def folder(path: Path, name: str = "deepseek_v3", depth: int = 2) -> dict[str, Tensor]:
    """A model of transformers with random layers of multi-token prediction; all tensors."""
    CASES[name].save(path)
    tensors: dict[str, Tensor] = {}
    for file in path.glob("model*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    config = json.loads((path / "config.json").read_text())
    last, width = config["num_hidden_layers"], config["hidden_size"]
    layer = {key: value for key, value in tensors.items() if key.startswith(f"model.layers.{last - 1}.")}
    for number in range(last, last + depth):
        added = {
            key.replace(f".{last - 1}.", f".{number}.", 1): torch.randn_like(value) for key, value in layer.items()
        }
        own = f"model.layers.{number}."
        added |= {f"{own}{norm}.weight": torch.randn(width) for norm in ("enorm", "hnorm", "shared_head.norm")}
        added[f"{own}eh_proj.weight"] = torch.randn(width, 2 * width)
        for key, shared in zip(SHARED, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
            added[own + key] = tensors[shared].clone()
        tensors |= added
    save_file(tensors, path / FILE, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": depth}))
    return tensors


def written(path: Path, kind: str, target: Path, **how: bool) -> None:
    found = open_weights(str(path))
    found = found.without_mtp() if how else replace(found, companions=())
    convert(found, plan_of(kind, found, target, Wanted()), target, {}, 1)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_there_and_back_are_the_same_files(name: str, tmp_path: Path) -> None:
    tensors = folder(tmp_path / "theirs", name)
    assert open_weights(str(tmp_path / "theirs")).model.mtp == MultiToken(2)
    written(tmp_path / "theirs", "megalite", tmp_path / "ours")
    written(tmp_path / "ours", "hf", tmp_path / "again")
    again = load_file(tmp_path / "again" / FILE)
    assert again.keys() == tensors.keys()
    assert all(again[key].equal(value) for key, value in tensors.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with one_rank():
        logits = decoder_of(str(tmp_path / "again"))(TOKENS.T).transpose(0, 1)
    assert distance(logits, loaded(TOKENS).logits) < 1e-5


def test_the_embedding_comes_first_in_the_projection(tmp_path: Path) -> None:
    """As in vLLM's `DeepSeekMultiTokenPredictorLayer`, whose projection takes the embedding, then the stream."""
    tensors = folder(tmp_path, depth=1)
    last = open_weights(str(tmp_path)).model.layers
    with one_rank():
        decoder = decoder_of(str(tmp_path))
        mtp = decoder.layers[str(last)].mtp
        assert part(mtp.projection.weight).equal(tensors[f"model.layers.{last}.eh_proj.weight"])
        assert part(mtp.embedding_norm.weight).equal(tensors[f"model.layers.{last}.enorm.weight"])
        embedded, x = torch.randn(2, 5, 1, mtp.projection.weight.shape[0]).unbind()
        norms = mtp.embedding_norm(embedded), mtp.stream_norm(x)
        expected = torch.cat(norms, -1) @ tensors[f"model.layers.{last}.eh_proj.weight"].T
        torch.testing.assert_close(mtp(x, embedded), expected)


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    tensors = folder(tmp_path)
    tensors["model.layers.5.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(DamagedError, match=r"model\.layers\.5\.shared_head\.head\.weight is not lm_head\.weight"):
        open_weights(str(tmp_path))


def test_folders_may_lack_layers_that_their_configuration_tells(tmp_path: Path) -> None:
    """As transformers writes them."""
    folder(tmp_path)
    kept = {
        key: value for key, value in load_file(tmp_path / FILE).items() if not re.match(r"model\.layers\.[45]\.", key)
    }
    save_file(kept, tmp_path / FILE, {"format": "pt"})
    assert open_weights(str(tmp_path)).model.mtp is None


def test_they_may_be_left_out(tmp_path: Path) -> None:
    folder(tmp_path / "theirs")
    written(tmp_path / "theirs", "hf", tmp_path / "again", without=True)
    again, theirs = load_file(tmp_path / "again" / FILE), folder(tmp_path / "plain", depth=0).keys()
    assert again.keys() == theirs
    assert open_weights(str(tmp_path / "again")).model.mtp is None


def test_a_family_without_them_is_refused_with_a_way_out() -> None:
    """The factor of their losses is no part of the weights, so it is not what the family lacks."""
    rule = r"llama, the nearest, cannot express model\.mtp\.depth = 2; megalite-convert --without-mtp leaves"
    with pytest.raises(InputError, match=rule):
        family_of(Model(mtp=MultiToken(2, 0.1)))


def test_a_configuration_keeps_what_else_it_tells_without_them(tmp_path: Path) -> None:
    """A folder as transformers writes it, whose config.json has keys that megalite does not know."""
    folder(tmp_path / "theirs", depth=0)
    path = tmp_path / "theirs" / "config.json"
    told = {**json.loads(path.read_text()), "num_nextn_predict_layers": 2, "pretraining_tp": 7}
    path.write_text(json.dumps(told))
    found = open_weights(str(tmp_path / "theirs"))
    convert(found, plan_of("hf", found, tmp_path / "again", Wanted()), tmp_path / "again", {}, 1)
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["pretraining_tp"] == 7
    assert open_weights(str(tmp_path / "again")).model == found.model


def test_copies_of_a_tied_head_are_the_embedding() -> None:
    """In files whose configuration ties the head, which has no tensor of its own."""
    table = FAMILIES["glm4_moe"].table(Model(4, tie_embeddings=True, mtp=MultiToken(1)), copies=True)
    assert table["model.layers.4.shared_head.head.weight"] == table["model.embed_tokens.weight"]
    assert "lm_head.weight" not in table


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_other_files_have_no_place_for_them(kind: str, tmp_path: Path) -> None:
    folder(tmp_path / "theirs")
    found = open_weights(str(tmp_path / "theirs"))
    with pytest.raises(InputError, match=r"model\.mtp"):
        plan_of(kind, found, tmp_path / "target", Wanted())
