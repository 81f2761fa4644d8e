"""Rotation of queries and keys that one matrix product made with values."""

import pytest
import torch
from rotations import LAYOUTS
from rounding import DEVICE, numbers_below, random
from torch import Tensor

from megalite_kernels import rope, rope_of_joint, rope_of_parts
from megalite_kernels.backend import Backend
from megalite_kernels.rope import Layout
from megalite_kernels.rope_of_parts import bytes_moved

HEADS = (4, 12), (2, 12), (2, 7)  # of queries, keys and values, and their widths
WIDTHS = [heads * width for heads, width in HEADS]


def parts(length: int, batch: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values as parts of one tensor."""
    whole = random(length, batch, sum(WIDTHS), dtype=dtype, seed=seed)
    return [part.unflatten(-1, heads) for part, heads in zip(whole.split(WIDTHS, -1), HEADS, strict=True)]


def angles(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    turns = random(length, 1, 1, 6, dtype=dtype, seed=3)
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 2), (3, 1), (1, 1), (0, 2)])
def test_parts_are_turned_as_alone(shape: tuple[int, int], layout: Layout, backend: Backend) -> None:
    """And gradients of kernels lie one behind the other."""
    length, batch = shape
    given = [part.requires_grad_() for part in parts(*shape, seed=0)]
    grads = [random(*part.shape, dtype=torch.float64, seed=seed) for seed, part in enumerate(given)]
    at = numbers_below(2 * length, batch, length, seed=2).T if length else 0
    for positions in (0, at):
        how = *angles(2 * length), positions, layout, backend
        found = rope_of_parts(*given, *how)
        expected = *(rope(part, *how) for part in given[:2]), given[2]
        assert all(map(torch.equal, found, expected))
        assert all(part.is_contiguous() for part in found)
        of_parts = torch.autograd.grad(found, given, grads)
        assert all(map(torch.equal, of_parts, torch.autograd.grad(expected, given, grads)))
        if backend == "triton":
            first, *others = of_parts
            assert all(part.untyped_storage()._cdata == first.untyped_storage()._cdata for part in others)
            assert [part.storage_offset() for part in of_parts] == [0, WIDTHS[0], WIDTHS[0] + WIDTHS[1]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 2), (3, 1), (1, 1), (0, 2)])
def test_parts_turned_in_place_are_those_turned_apart(shape: tuple[int, int], layout: Layout) -> None:
    given = [part.requires_grad_() for part in parts(*shape, seed=0)]
    grads = [random(*part.shape, dtype=torch.float64, seed=seed) for seed, part in enumerate(given)]
    how = *angles(shape[0]), 0, layout, "triton"
    apart = rope_of_parts(*given, *how)
    of_parts = torch.autograd.grad(apart, given, grads)
    product = [part * 1 for part in given]
    together = torch.cat([part.flatten(2) for part in product], -1)
    again = [part.unflatten(-1, heads) for part, heads in zip(together.split(WIDTHS, -1), HEADS, strict=True)]
    found = rope_of_parts(*again, *how, in_place=True)
    assert all(map(torch.equal, found, apart))
    assert {part.untyped_storage()._cdata for part in found} == {together.untyped_storage()._cdata}
    assert all(map(torch.equal, torch.autograd.grad(found, given, grads), of_parts))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 2), (3, 1), (0, 2)])
def test_parts_of_a_tensor_are_turned_as_parts(
    shape: tuple[int, int], layout: Layout, backend: Backend, in_place: bool
) -> None:
    """With one gradient of all three."""
    given = [part.requires_grad_() for part in parts(*shape, seed=0)]
    how = *angles(shape[0]), 0, layout, backend
    expected = rope_of_parts(*given, *how)
    grads = [random(*part.shape, dtype=torch.float64, seed=seed) for seed, part in enumerate(given)]
    of_parts = torch.autograd.grad(expected, given, grads)
    leaf = torch.cat([part.detach().flatten(2) for part in given], -1).requires_grad_()
    joint = leaf * 1
    found = rope_of_joint(joint, HEADS, *how, in_place=in_place)
    assert all(map(torch.equal, found, expected))
    if backend == "triton":
        stays = [part.untyped_storage()._cdata == joint.untyped_storage()._cdata for part in found]
        assert stays == [in_place] * 3
    (of_joint,) = torch.autograd.grad(found, [leaf], grads)
    assert torch.equal(of_joint, torch.cat([grad.flatten(2) for grad in of_parts], -1))


def test_heads_apart_are_not_turned_in_place() -> None:
    """The kernel puts the heads of a token next to each other."""
    q, k, v = parts(5, 1, seed=0)
    wide = torch.stack((q, q), 3)[:, :, :, 0]
    found = rope_of_parts(wide, k, v, *angles(5), backend="triton", in_place=True)
    assert torch.equal(wide, q)
    assert all(map(torch.equal, found, rope_of_parts(q, k, v, *angles(5), backend="triton")))


def test_what_keeps_a_part_is_told_that_it_was_turned() -> None:
    q, k, v = (part.requires_grad_() for part in parts(5, 1, seed=0))
    product = q * 1
    kept = product.square()
    rope_of_parts(product, k * 1, v, *angles(5), backend="triton", in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_registered_ops() -> None:
    given = [part.requires_grad_() for part in parts(5, 2, seed=0, dtype=torch.float32)]
    how = *angles(5, torch.float32), None, 0, False
    torch.library.opcheck(torch.ops.megalite.rope_of_parts.default, (*given, *how))
    detached = [part.detach() for part in given]
    torch.library.opcheck(torch.ops.megalite.rope_of_parts_backward.default, (*detached, *how))
    torch.library.opcheck(torch.ops.megalite.rope_of_parts_in_place.default, (*detached[:2], *how))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_arguments_that_do_not_match(backend: Backend) -> None:
    cos = torch.zeros(5, 1, 1, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"cos \[5, 1, 1, 4\]"):
        rope_of_parts(*parts(5, 1, seed=0), cos, cos, backend=backend)


def test_bytes_moved() -> None:
    """Those of 32 query and 8 key heads turned, and 8 value heads copied, or left where they are in forward."""
    assert bytes_moved(8192, (32 + 8 + 8) * 128, torch.bfloat16) == (2 * 8192 * 6144 * 2,) * 2
    in_place = 2 * 8192 * 5120 * 2, 2 * 8192 * 6144 * 2
    assert bytes_moved(8192, (32 + 8 + 8) * 128, torch.bfloat16, 8 * 128) == in_place
