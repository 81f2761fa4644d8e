"""What a rank of a probe measures, in one process; tests/launch/preflight runs several."""

import pytest
import torch

from megalite.distributed.start import probe

CPU = torch.device("cpu")


def test_a_product_is_fast_and_has_the_same_bits_each_time() -> None:
    first, second = probe.matmul(CPU, 0.0), probe.matmul(CPU, 0.0)
    assert 1e7 < first["matmul"] < 1e14
    assert (first["digest"], first["steady"], second["steady"]) == (second["digest"], True, True)


def test_a_product_that_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = torch.matmul, []

    def wrong(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        right(a, b, out=out)
        if len(calls) == 23:  # the last of 3 + 20
            out[7, 9] = torch.nextafter(out[7, 9], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(torch, "matmul", wrong)
    assert not probe.matmul(CPU, 0.0)["steady"]


def test_copies_have_a_rate_in_each_direction() -> None:
    rates = probe.copies(CPU, 2**20)
    assert set(rates) == {"to_device", "to_host"}
    assert all(1e7 < rate < 1e13 for rate in rates.values())
