"""Rotary frequencies and angles."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.layers import Rope, Rotation
from megalite.config.model_schema import RopeScaling
from megalite.model.positions import angles, attention_factor, frequencies, least_alike

LLAMA31 = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
LLAMA32 = replace(LLAMA31, factor=32.0)
SCALINGS = st.builds(
    RopeScaling,
    factor=st.floats(1.0, 64.0),
    low_frequency_factor=st.floats(0.25, 2.0),
    high_frequency_factor=st.floats(2.5, 8.0),
    original_length=st.sampled_from([32, 512, 8192]),
) | st.builds(RopeScaling, kind=st.just("linear"), factor=st.floats(1.0, 64.0))
YARNS = [  # with widths of heads, and theta; the first is Qwen2.5's
    (RopeScaling("yarn", 4.0, original_length=32768), 128, 1e6),
    (RopeScaling("yarn", 16.0, original_length=4096, attention_factor=0.7), 64, 1e4),
    (RopeScaling("yarn", 8.0, original_length=16, beta_fast=4.0), 8, 500.0),
    (RopeScaling("yarn", 2.0, original_length=10**6), 8, 2.0),  # all pairs rotate often
    (RopeScaling("yarn", 2.0, original_length=4, beta_fast=30.0, beta_slow=0.1), 4, 10.0),
    (RopeScaling("yarn", 2.0, original_length=4, beta_fast=1.0, beta_slow=0.7), 4, 10.0),  # no pair is between
    (RopeScaling("yarn", 1.0), 128, 5e5),
]


def _turned(head_width: int, theta: float, scaling: RopeScaling | None = None) -> Rotation:
    return Rotation(Rope(theta, scaling), head_width, head_width)


def _formula(head_width: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Linear scaling, or Llama 3.1's rule as it is usually told, by wavelength."""
    found = []
    for pair in range(head_width // 2):
        frequency = theta ** (-2 * pair / head_width)
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / frequency
            longest = scaling.original_length / scaling.low_frequency_factor
            shortest = scaling.original_length / scaling.high_frequency_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength > shortest:
                smooth = (scaling.original_length / wavelength - scaling.low_frequency_factor) / (
                    scaling.high_frequency_factor - scaling.low_frequency_factor
                )
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        found.append(frequency)
    return found


@given(st.integers(1, 64), st.sampled_from([100.0, 10_000.0, 500_000.0]), st.none() | SCALINGS)
def test_frequencies_equal_the_formula(pairs: int, theta: float, scaling: RopeScaling | None) -> None:
    found = frequencies(_turned(2 * pairs, theta, scaling), 9)
    expected = torch.tensor(_formula(2 * pairs, theta, scaling), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("scaling", [LLAMA31, LLAMA32])
def test_frequencies_equal_those_of_transformers(scaling: RopeScaling) -> None:
    """To the float32 in which transformers computes them."""
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131_072, rope_parameters=rope)
    expected, attention_factor = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    found = frequencies(_turned(128, 500_000.0, scaling), 9)
    assert attention_factor == 1.0
    # A frequency is the quotient, power and blend of few rounded numbers; the exponent's rounding grows by ln θ.
    rounding = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, expected.double(), rtol=(8 + math.log(500_000.0)) * rounding, atol=0)


@pytest.mark.parametrize(("scaling", "head_width", "theta"), YARNS)
def test_yarn_is_that_of_transformers(scaling: RopeScaling, head_width: int, theta: float) -> None:
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
    }
    length = int(scaling.factor * scaling.original_length)
    config = transformers.LlamaConfig(head_dim=head_width, max_position_embeddings=length, rope_parameters=rope)
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    rounding = (8 + math.log(theta)) * torch.finfo(torch.float32).eps
    found = frequencies(_turned(head_width, theta, scaling), 9)
    torch.testing.assert_close(found, expected.double(), rtol=rounding, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)


LONG = RopeScaling(
    "longrope", 32.0, original_length=4096, short_factors=[1.0, 1.1, 1.2], long_factors=[1.05, 7.0, 64.0]
)


@pytest.mark.parametrize("length", [4096, 4097, 20_000])
@pytest.mark.parametrize(
    "scaling", [LONG, replace(LONG, attention_factor=1.3), RopeScaling("dynamic", 4.0, original_length=4096)]
)
def test_what_depends_on_the_length_is_that_of_transformers(scaling: RopeScaling, length: int) -> None:
    """With three quarters of a head that turn."""
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = {
        "rope_type": scaling.kind,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "factor": scaling.factor,
        "attention_factor": scaling.attention_factor,
        "original_max_position_embeddings": scaling.original_length,
        "short_factor": scaling.short_factors,
        "long_factor": scaling.long_factors,
    }
    config = transformers.LlamaConfig(head_dim=8, max_position_embeddings=scaling.original_length, rope_parameters=rope)
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS[scaling.kind](config, seq_len=length)
    found = frequencies(replace(_turned(8, 1e4, scaling), rotary_width=6), length)
    rounding = (8 + math.log(1e4)) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found[:3], expected.double(), rtol=rounding, atol=0)
    assert found[3:].tolist() == [0]
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("scaling", [None, LLAMA31, LONG, RopeScaling("dynamic", 4.0, original_length=4096)])
def test_lengths_that_are_alike_have_the_same_frequencies_and_others_do_not(scaling: RopeScaling | None) -> None:
    rotation = replace(_turned(8, 1e4, scaling), rotary_width=6)
    lengths = (1, 4095, 4096, 4097, 4098, 99_999)
    pairs = [(least_alike(scaling, length), frequencies(rotation, length)) for length in lengths]
    for (one, mine), (other, yours) in product(pairs, pairs):
        assert torch.equal(mine, yours) == (one == other)
        assert torch.equal(frequencies(rotation, one), mine)


def test_features_that_do_not_turn_keep_their_values() -> None:
    """The attention factor is not theirs either."""
    rotation = replace(_turned(8, 1e4, LONG), rotary_width=6)
    cos, sin = angles(rotation, torch.arange(50), torch.float64, 5000)
    assert cos[..., 3].unique().tolist() == [1]
    assert sin[..., 3].unique().tolist() == [0]
    assert cos[0, 0, 0, 0] == attention_factor(LONG) != 1


def test_the_attention_factor_multiplies_cosines_and_sines() -> None:
    scaling = RopeScaling("yarn", factor=math.e**10, attention_factor=None)
    plain = angles(_turned(8, 500.0, scaling), torch.arange(99), torch.float64, 99)
    assert plain[0][0].tolist() == [[[pytest.approx(2, rel=1e-15)] * 4]]
    larger = angles(_turned(8, 500.0, replace(scaling, attention_factor=6.0)), torch.arange(99), torch.float64, 99)
    torch.testing.assert_close(larger, tuple(3 * x for x in plain), rtol=1e-14, atol=0)


def test_scaling_keeps_high_and_divides_low_frequencies() -> None:
    plain = frequencies(_turned(128, 500_000.0), 9)
    scaled = frequencies(_turned(128, 500_000.0, LLAMA31), 9)
    assert torch.equal(scaled[:10], plain[:10])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8, rtol=1e-14, atol=0)
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_angles_are_exact_to_the_rounding_of_their_type(dtype: torch.dtype, wide: torch.dtype) -> None:
    rotation = _turned(16, 10_000.0)
    cos, sin = angles(rotation, torch.arange(5000), dtype, 5000)
    assert cos.shape == sin.shape == (5000, 1, 1, 8)
    assert cos.dtype == sin.dtype == wide
    for position, pair in [(0, 0), (1, 0), (4999, 0), (4999, 3), (4999, 7)]:
        turn = position * 10_000.0 ** (-2 * pair / 16)
        # The angle itself is rounded in float64: its error is absolute and grows with the angle.
        tolerance = torch.finfo(wide).eps + 4 * turn * torch.finfo(torch.float64).eps
        assert cos[position, 0, 0, pair].item() == pytest.approx(math.cos(turn), rel=0, abs=tolerance)
        assert sin[position, 0, 0, pair].item() == pytest.approx(math.sin(turn), rel=0, abs=tolerance)
