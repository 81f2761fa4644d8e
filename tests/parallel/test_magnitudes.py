"""Outputs that are scaled to trained norms of rows, beside the rows of the whole matrix."""

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from toy_jobs import one_rank

from megalite.parallel.magnitudes import scaled_to_magnitudes

SCALE = 1.5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def placed(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()]).requires_grad_()


def with_all_inputs(weight: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs that are scaled, as one rank computes them, and gradients of outputs and of what is added to norms."""
    rows, inputs = weight.shape
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        y, m = drawn(3, 2, rows).requires_grad_(), placed(added, mesh)
        matrix = placed(weight, mesh), placed(drawn(4, inputs), mesh), placed(drawn(rows, 4), mesh)
        made = scaled_to_magnitudes(y, m, matrix, SCALE, bias=placed(drawn(rows), mesh))
        made.backward(drawn(3, 2, rows))
        assert all(each.grad is None for each in matrix)
        assert isinstance(m.grad, DTensor)
        assert y.grad is not None
        return made.detach(), y.grad, m.grad.to_local()


def test_rows_have_the_trained_norms() -> None:
    weight, added = drawn(7, 5), drawn(7)
    made, of_y, of_added = with_all_inputs(weight, added)
    whole, y, m = weight + SCALE * drawn(7, 4) @ drawn(4, 5), drawn(3, 2, 7).requires_grad_(), added.requires_grad_()
    factors = (weight.norm(dim=1) + m) / whole.norm(dim=1)
    expected = (y - drawn(7)) * factors + drawn(7)
    expected.backward(drawn(3, 2, 7))
    for found, wanted in ((made, expected), (of_y, y.grad), (of_added, m.grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_row_of_zeros_stays_so() -> None:
    weight = drawn(7, 5)
    weight[3] = 0
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        y = torch.zeros(2, 7)
        second = placed(torch.zeros(7, 4), mesh)
        matrix = placed(weight.float(), mesh), placed(drawn(4, 5).float(), mesh), second
        made = scaled_to_magnitudes(y, placed(torch.zeros(7), mesh), matrix, SCALE)
    assert made.equal(y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_changed_before_training(dtype: torch.dtype) -> None:
    """To the bit, though norms are not numbers of the precision in which layers compute."""
    with one_rank():
        mesh, y = init_device_mesh("cpu", (1,)), drawn(9, 7).to(dtype)
        matrix = tuple(placed(each.to(dtype), mesh) for each in (drawn(7, 5), drawn(4, 5), torch.zeros(7, 4)))
        made = scaled_to_magnitudes(y, placed(torch.zeros(7, dtype=dtype), mesh), matrix, SCALE)
    assert made.equal(y)


def of_a_part() -> Tensor:
    mesh = init_device_mesh("cpu", (8,))
    rank, group = mesh.get_rank(), mesh.get_group()
    mine = slice(2 * rank, 2 * rank + 2)
    matrix = placed(drawn(7, 16)[:, mine], mesh), placed(drawn(4, 16)[:, mine], mesh), placed(drawn(7, 4), mesh)
    return scaled_to_magnitudes(drawn(3, 2, 7), placed(drawn(7), mesh), matrix, SCALE, group).detach()


def test_ranks_with_parts_of_rows_scale_alike(ranks: Ranks) -> None:
    weight, added = drawn(7, 16), drawn(7)
    factors = (weight.norm(dim=1) + added) / (weight + SCALE * drawn(7, 4) @ drawn(4, 16)).norm(dim=1)
    for found in ranks.run(of_a_part):
        torch.testing.assert_close(found, drawn(3, 2, 7) * factors, rtol=1e-12, atol=1e-12)
