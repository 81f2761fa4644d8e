"""Multipliers folded into weights: the same logits from layers without them, ours and transformers'."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import GEMMA2, LLAMA, OLMO2, Float64Everywhere
from torch import Tensor
from toy_jobs import config_of, make, save

from megalite.base.errors import InputError
from megalite.checkpoint.run.resume import check_export, check_start
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import huggingface
from megalite.checkpoint.weights.maps.folded import folded
from megalite.checkpoint.weights.sources import open_checkpoint
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Base, Model
from megalite.config.schema import Checkpoint, Config
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder

transformers = pytest.importorskip("transformers")
FACTORS: dict[str, Any] = {
    "parametrization": "completep",
    "base": Base(width=5, layers=3, head_width=3),
    "embedding_multiplier": 3.0,
    "logits_multiplier": 0.7,
}
MODELS = {
    "llama": replace(LLAMA, kv_heads=2, **FACTORS),
    "llama, tied": replace(LLAMA, tie_embeddings=True, **FACTORS),
    "qwen2": replace(LLAMA, qkv_bias=True, **FACTORS),
    "qwen3, tied": replace(LLAMA, qk_norm=True, tie_embeddings=True, **FACTORS),
    "olmo2": replace(OLMO2, **FACTORS),
    "phi3": replace(LLAMA, attention=Attention(window=5), **FACTORS),
    "mup": replace(LLAMA, **FACTORS | {"parametrization": "mup"}),
    "standard": replace(LLAMA, embedding_multiplier=3.0),
    "scale of scores": replace(LLAMA, attention=Attention(scale=0.9)),
}


def decoder_of(model: Model, mesh: Mesh, weights: dict[str, Tensor] | None = None) -> Decoder:
    """With these weights, or None for random ones, norms and biases included."""
    decoder = Decoder(model, mesh.tp, range(model.layers)).double().to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in decoder.named_parameters():
            local = param.to_local()
            if weights is None:
                local.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
            else:
                local.copy_(weights[name])
    return decoder


def weights_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: param.to_local().detach().clone() for name, param in decoder.named_parameters()}


def test_multipliers_that_a_family_has_stay() -> None:
    assert folded(GEMMA2) == (GEMMA2, {})
    with pytest.raises(InputError, match="one_plus_weight has multipliers, which other programs lack and which cannot"):
        folded(replace(GEMMA2, logits_multiplier=2.0))


def tokens_of(model: Model) -> Tensor:
    return torch.randint(model.vocab_size, (10, 2), generator=torch.Generator().manual_seed(1))


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    tokens = tokens_of(decoder.model)
    decoder(tokens[:-1], targets=tokens[1:]).backward()
    return {name: param.grad.to_local() for name, param in decoder.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("case", MODELS)
def test_a_folded_model_computes_the_same(case: str, alone: Mesh) -> None:
    model = MODELS[case]
    plain, factors = folded(model)
    attention = replace(model.attention, scale=None)
    assert plain == replace(
        model,
        parametrization="standard",
        base=None,
        embedding_multiplier=1.0,
        logits_multiplier=1.0,
        attention=attention,
    )
    decoder = decoder_of(model, alone)
    weights = weights_of(decoder)
    assert factors.keys() <= weights.keys()
    other = decoder_of(plain, alone, {name: weight * factors.get(name, 1.0) for name, weight in weights.items()})
    with torch.no_grad():
        expected, found = decoder(tokens_of(model)), other(tokens_of(model))
        unfolded = decoder_of(plain, alone, weights)(tokens_of(model))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    assert (unfolded - expected).abs().max() > 0.01 * expected.abs().max()  # else all factors would be 1


@pytest.mark.parametrize("case", MODELS)
def test_gradients_are_those_of_the_folded_model(case: str, alone: Mesh) -> None:
    """By the chain rule, those of a weight are those of the folded weight times its factor."""
    model = MODELS[case]
    plain, factors = folded(model)
    decoder = decoder_of(model, alone)
    weights = {name: weight * factors.get(name, 1.0) for name, weight in weights_of(decoder).items()}
    expected, found = gradients(decoder_of(plain, alone, weights)), gradients(decoder)
    assert found.keys() == expected.keys() == weights.keys()
    for name, gradient in found.items():
        theirs = expected[name] * factors.get(name, 1.0)
        torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12 * theirs.abs().max().item(), msg=name)


@pytest.mark.parametrize("case", ["llama, tied", "olmo2", "qwen2"])
def test_an_export_has_the_logits_of_the_run(case: str, alone: Mesh, tmp_path: Path) -> None:
    model = MODELS[case]
    config = replace(config_of(Layout(), model), checkpoint=Checkpoint(export="hf"))
    check_export(config)
    tokens = torch.arange(model.sequence_length) % model.vocab_size
    job = make(config)
    found = open_checkpoint(save(job, tmp_path, 1)).folded()
    with torch.no_grad():
        expected = job.stages[0](tokens[:, None])[:, 0]
    convert(found, huggingface.plan(found, None, None), tmp_path / "hf", {})
    with Float64Everywhere():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
        logits = theirs(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


def test_what_does_not_go_along_is_refused_by_name(alone: Mesh, tmp_path: Path) -> None:
    config = config_of(Layout(), MODELS["mup"])
    path = save(make(config), tmp_path / "run", 1)
    with pytest.raises(InputError, match=r"model.parametrization = mup: has factors .* leave --optimizer out"):
        open_checkpoint(path, states=True).folded()
    found = open_checkpoint(path).folded()
    convert(found, huggingface.plan(found, None, None), tmp_path / "hf", {})
    begun = replace(config, checkpoint=Checkpoint(weights=f"hf:{tmp_path / 'hf'}"))
    with pytest.raises(InputError, match=r'model.parametrization = "mup": the checkpoint .* has "standard"'):
        check_start(begun, tmp_path / "new")


def test_nothing_changes_without_factors(alone: Mesh, tmp_path: Path) -> None:
    path = save(make(config_of(Layout())), tmp_path, 1)
    found = open_checkpoint(path, states=True).folded()
    assert (found.factors, found.model) == ({}, open_checkpoint(path).model)
    assert folded(Config().model) == (Config().model, {})


def test_every_tensor_of_a_fused_projection_has_its_own_factor(alone: Mesh, tmp_path: Path) -> None:
    """Phi-3 stacks queries, keys and values; only queries are multiplied."""
    model = replace(LLAMA, **FACTORS)
    job = make(config_of(Layout(), model))
    found = open_checkpoint(save(job, tmp_path, 1)).folded()
    ours = {name: param.full_tensor().detach() for name, param in job.named_parameters()}
    convert(
        replace(found, family="phi3"), huggingface.plan(replace(found, family="phi3"), None, None), tmp_path / "hf", {}
    )
    theirs = transformers.Phi3ForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).state_dict()
    together = theirs["model.layers.1.self_attn.qkv_proj.weight"]
    scores = 3**0.5 / 8 * 8**0.5
    parts = [ours[f"layers.1.attention.{name}.weight"] * (scores if name == "q" else 1) for name in "qkv"]
    torch.testing.assert_close(together, torch.cat(parts), rtol=1e-15, atol=0)
