"""One process with the same weights computes what Hugging Face's models compute, in float64."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from oracle import LENGTH, LLAMA, MODELS, Float64Everywhere, as_ours, copy_weights, oracle_of
from torch import Tensor

from megalite.config.model_schema import Model
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import cut, parameters

gemma2 = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")

TOLERANCE = 1e-10  # float64 rounding through two layers is near 1e-15; one float32 rounding anywhere is near 1e-7
BATCH = 3


@dataclass(frozen=True)
class Answer:
    logits: Tensor  # b s v
    loss: Tensor  # summed over tokens
    gradients: dict[str, Tensor]


@pytest.mark.parametrize("case", MODELS)
def test_decoder_equals_transformers(case: str, alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = MODELS[case]
    oracle = oracle_of(family, model)
    if model.attention.softcap is not None:
        capped = partial(gemma2.eager_attention_forward, softcap=model.attention.softcap)
        monkeypatch.setattr(sys.modules[type(oracle).__module__], "eager_attention_forward", capped)
    tokens = torch.randint(model.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    expected = _their_answer(oracle, tokens)
    found = _our_answer(_decoder(model, alone, oracle), tokens)

    _assert_equal(found.logits, expected.logits)
    _assert_equal(found.loss, expected.loss)
    gradients = as_ours(family, model, expected.gradients)
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        _assert_equal(found.gradients[name], gradient)


def test_the_oracle_without_the_mode_is_not_float64() -> None:
    """Else the mode would be superfluous, or the tolerance too wide to notice a float32 rounding."""
    oracle = oracle_of("Llama", LLAMA)
    tokens = torch.arange(LENGTH)[None]
    rounded = oracle(input_ids=tokens).logits
    with Float64Everywhere():
        exact = oracle(input_ids=tokens).logits
    assert _distance(rounded, exact) > 100 * TOLERANCE


def _decoder(model: Model, mesh: Mesh, oracle: Any) -> Decoder:
    """Our model with the oracle's weights."""
    decoder = Decoder(model, mesh.tp, range(model.layers)).to(torch.float64).to_empty(device="cpu")
    copy_weights(decoder, oracle)
    return decoder


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
    gradients = {name: cut(param.grad, shape).to_local() for name, param, _, shape in parameters(decoder)}
    return Answer(decoder(inputs).detach().transpose(0, 1), loss.detach(), gradients)


def _assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype == torch.float64
    assert _distance(found, expected) <= TOLERANCE


def _distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()
