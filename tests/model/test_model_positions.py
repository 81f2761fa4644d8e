"""Rotary frequencies and angles."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.schema import Model, RopeScaling
from megalite.model.positions import angles, frequencies

LLAMA31 = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
LLAMA32 = replace(LLAMA31, factor=32.0)
SCALINGS = st.builds(
    RopeScaling,
    factor=st.floats(1.0, 64.0),
    low_frequency_factor=st.floats(0.25, 2.0),
    high_frequency_factor=st.floats(2.5, 8.0),
    original_length=st.sampled_from([32, 512, 8192]),
)


def _model(head_width: int, theta: float, scaling: RopeScaling | None = None) -> Model:
    return Model(width=256, heads=2, head_width=head_width, rope_theta=theta, rope_scaling=scaling)


def _formula(head_width: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Llama 3.1's rule as it is usually told, by wavelength."""
    found = []
    for pair in range(head_width // 2):
        frequency = theta ** (-2 * pair / head_width)
        if scaling is not None:
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
    found = frequencies(_model(2 * pairs, theta, scaling))
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
    found = frequencies(_model(128, 500_000.0, scaling))
    assert attention_factor == 1.0
    # A frequency is the quotient, power and blend of few rounded numbers; the exponent's rounding grows by ln θ.
    rounding = torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, expected.double(), rtol=(8 + math.log(500_000.0)) * rounding, atol=0)


def test_scaling_keeps_high_and_divides_low_frequencies() -> None:
    plain = frequencies(_model(128, 500_000.0))
    scaled = frequencies(_model(128, 500_000.0, LLAMA31))
    assert torch.equal(scaled[:10], plain[:10])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 8, rtol=1e-14, atol=0)
    assert (scaled.diff() < 0).all()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_angles_are_exact_to_the_rounding_of_their_type(dtype: torch.dtype, wide: torch.dtype) -> None:
    model = _model(16, 10_000.0)
    cos, sin = angles(model, torch.arange(5000), dtype)
    assert cos.shape == sin.shape == (5000, 1, 1, 8)
    assert cos.dtype == sin.dtype == wide
    for position, pair in [(0, 0), (1, 0), (4999, 0), (4999, 3), (4999, 7)]:
        turn = position * 10_000.0 ** (-2 * pair / 16)
        # The angle itself is rounded in float64: its error is absolute and grows with the angle.
        tolerance = torch.finfo(wide).eps + 4 * turn * torch.finfo(torch.float64).eps
        assert cos[position, 0, 0, pair].item() == pytest.approx(math.cos(turn), rel=0, abs=tolerance)
        assert sin[position, 0, 0, pair].item() == pytest.approx(math.sin(turn), rel=0, abs=tolerance)
