"""One process with the same weights computes what Hugging Face's models compute, in float64."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.checkpoint.huggingface import sizes, their_name
from megalite.config.layers import layer_kinds
from megalite.config.schema import SCALING_KEYS, Attention, Model, RopeScaling
from megalite.dist.mesh import Mesh
from megalite.model.decoder import Decoder

transformers = pytest.importorskip("transformers")
gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")

TOLERANCE = 1e-10  # float64 rounding through two layers is near 1e-15; one float32 rounding anywhere is near 1e-7
LENGTH, BATCH = 24, 3
ROPE = {  # our keys, in transformers
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}

LLAMA = Model(layers=2, width=32, heads=4, kv_heads=4, ffn=48, vocab_size=61, sequence_length=LENGTH, rope_theta=500.0)
# Of the 4 pairs of features of a head: one left alone, one interpolated, two stretched.
SCALING = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32)
OLMO2 = replace(LLAMA, norm="post", qk_norm=True, qk_norm_width="all")
AFTER = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "post_feedforward_layernorm"}
# One pair left alone, one interpolated, two stretched.
YARN = RopeScaling("yarn", factor=8.0, original_length=64, beta_fast=8.0, beta_slow=1.0)
MODELS = {
    "llama": ("Llama", LLAMA),
    "llama_grouped_queries": ("Llama", replace(LLAMA, kv_heads=2)),
    "llama_one_kv_head": ("Llama", replace(LLAMA, kv_heads=1)),
    "llama_tied": ("Llama", replace(LLAMA, tie_embeddings=True)),
    "llama_head_width": ("Llama", replace(LLAMA, head_width=12)),
    "llama_rope_scaling": ("Llama", replace(LLAMA, rope_scaling=SCALING)),
    "llama_linear": ("Llama", replace(LLAMA, rope_scaling=RopeScaling("linear", factor=3.0))),
    "llama_yarn": ("Llama", replace(LLAMA, rope_scaling=YARN)),
    "qwen2_yarn_attention_factor": (
        "Qwen2",
        replace(LLAMA, qkv_bias=True, rope_scaling=replace(YARN, attention_factor=1.5)),
    ),
    "llama_large_eps": ("Llama", replace(LLAMA, norm_eps=0.1)),
    "qwen2_bias": ("Qwen2", replace(LLAMA, kv_heads=2, qkv_bias=True)),
    "qwen3": ("Qwen3", replace(LLAMA, kv_heads=2, qk_norm=True, head_width=8)),
    "smollm3": ("SmolLM3", replace(LLAMA, layers=4, kv_heads=2, attention=Attention(nope_every=3))),
    "smollm3_no_rotary_positions": ("SmolLM3", replace(LLAMA, kv_heads=2, attention=Attention(nope_every=1))),
    "olmo2": ("Olmo2", OLMO2),
    "olmo2_grouped_queries_tied": ("Olmo2", replace(OLMO2, kv_heads=2, tie_embeddings=True, norm_eps=0.1)),
    "olmo2_head_width": ("Olmo2", replace(OLMO2, kv_heads=2, head_width=12)),
    "mistral_window": ("Mistral", replace(LLAMA, kv_heads=2, attention=Attention(window=5))),
    "qwen3_alternating_windows": (
        "Qwen3",
        replace(LLAMA, layers=4, qk_norm=True, attention=Attention(window=7, full_every=2)),
    ),
    # Gemma 2 differs from us elsewhere, so only its attention takes part, within another family.
    "llama_capped": ("Llama", replace(LLAMA, kv_heads=2, attention=Attention(softcap=0.5))),
    "qwen3_capped_windows": (
        "Qwen3",
        replace(LLAMA, layers=4, qk_norm=True, attention=Attention(window=7, full_every=2, softcap=0.5)),
    ),
    "qwen3_wide_heads_tied": ("Qwen3", replace(LLAMA, qk_norm=True, head_width=20, tie_embeddings=True)),
}


class Float64Everywhere(TorchFunctionMode):
    """Turns every mention of float32 into float64.

    transformers computes norms, rotary angles, softmax and loss in float32 whatever the model's data type.
    In bfloat16 that is an upcast; in float64 it rounds, which would hide differences below 1e-7.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Answer:
    logits: Tensor  # b s v
    loss: Tensor  # summed over tokens
    gradients: dict[str, Tensor]  # under transformers' names


@pytest.mark.parametrize("case", MODELS)
def test_decoder_equals_transformers(case: str, alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = MODELS[case]
    oracle = _oracle(family, model)
    if model.attention.softcap is not None:
        capped = partial(gemma2.eager_attention_forward, softcap=model.attention.softcap)
        monkeypatch.setattr(sys.modules[type(oracle).__module__], "eager_attention_forward", capped)
    tokens = torch.randint(model.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    expected = _their_answer(oracle, tokens)
    found = _our_answer(_decoder(model, alone, oracle), tokens)

    _assert_equal(found.logits, expected.logits)
    _assert_equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        _assert_equal(found.gradients[name], gradient)


def test_the_oracle_without_the_mode_is_not_float64() -> None:
    """Else the mode would be superfluous, or the tolerance too wide to notice a float32 rounding."""
    oracle = _oracle("Llama", LLAMA)
    tokens = torch.arange(LENGTH)[None]
    rounded = oracle(input_ids=tokens).logits
    with Float64Everywhere():
        exact = oracle(input_ids=tokens).logits
    assert _distance(rounded, exact) > 100 * TOLERANCE


def _oracle(family: str, model: Model) -> Any:
    """transformers' model with random weights, norms included."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if (scaling := model.rope_scaling) is not None:
        used = {"factor", *SCALING_KEYS[scaling.kind]}
        rope |= {ROPE.get(key, key): value for key, value in vars(scaling).items() if key in used}
        rope["rope_type"] = scaling.kind
    window: dict[str, Any] = {}
    if model.attention.window is not None:
        kinds = [kind.attention.window for kind in layer_kinds(model)]
        window = {"sliding_window": model.attention.window, "use_sliding_window": True}
        window["layer_types"] = ["full_attention" if kind is None else "sliding_attention" for kind in kinds]
    options = {**sizes(model), **window, "rope_parameters": rope, "attn_implementation": "eager"}
    if family == "SmolLM3":
        options["no_rope_layer_interval"] = model.attention.nope_every
    # Some lie outside of the small vocabulary, and the embedding of padding gets no gradient.
    options |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = getattr(transformers, f"{family}Config")(**options)
    with Float64Everywhere():
        oracle = getattr(transformers, f"{family}ForCausalLM")(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in oracle.named_parameters():
            param.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return oracle


def _decoder(model: Model, mesh: Mesh, oracle: Any) -> Decoder:
    """Our model with the oracle's weights."""
    decoder = Decoder(model, mesh.tp, range(model.layers)).to(torch.float64).to_empty(device="cpu")
    weights = dict(oracle.named_parameters())
    ours = {_name(name, model): param for name, param in decoder.named_parameters()}
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, param in ours.items():
            param.to_local().copy_(weights[name])
    return decoder


def _name(name: str, model: Model) -> str:
    """The name in transformers; in a model with norms after attention and MLP, norms have other names."""
    parts = their_name(name).split(".")
    return ".".join(AFTER.get(part, part) for part in parts) if model.norm == "post" else ".".join(parts)


def _their_answer(oracle: Any, tokens: Tensor) -> Answer:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    with Float64Everywhere():
        output = oracle(input_ids=inputs, labels=targets, shift_labels=targets)
    loss = output.loss * targets.numel()
    loss.backward()
    gradients = {name: param.grad for name, param in oracle.named_parameters()}
    return Answer(output.logits.detach(), loss.detach(), gradients)


def _our_answer(decoder: Decoder, tokens: Tensor) -> Answer:
    inputs, targets = tokens[:, :-1].T, tokens[:, 1:].T
    loss = decoder(inputs, targets=targets)
    loss.backward()
    named = decoder.named_parameters()
    gradients = {_name(name, decoder.model): param.grad.full_tensor() for name, param in named}
    return Answer(decoder(inputs).detach().transpose(0, 1), loss.detach(), gradients)


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype == torch.float64
    assert _distance(found, expected) <= TOLERANCE


def _distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()
