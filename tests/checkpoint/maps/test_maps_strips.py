"""Strips: whatever tensors of theirs are made of, writing them and reading them again gives back our weights."""

from math import prod
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.checkpoint.store.index import Chunk, Index
from megalite.checkpoint.weights.convert import blocks
from megalite.checkpoint.weights.maps.strips import PREFIX, Strip, Theirs, part, under_our_names
from megalite.checkpoint.weights.reader import Reader
from megalite.plan.parts import roles
from megalite.plan.parts.part import Weight

sizes = st.integers(1, 6)


@st.composite
def cut(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Neighbouring ranges that cover a size."""
    ends = sorted(draw(st.sets(st.integers(1, size - 1))) if size > 1 else set())
    return list(zip([0, *ends], [*ends, size], strict=True))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Weight], dict[str, Theirs]]:
    """Weights, and tensors that hold every element of them once: blocks of equal width, in any order."""
    ours, strips = {}, {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
        name = f"weight{number}"
        ours[name] = Weight(shape, roles.NORM)
        for columns in draw(cut(shape[-1])) if len(shape) > 1 else [(0, 1)]:
            for rows in draw(cut(prod(shape[:-1] or shape))):
                strips.setdefault(columns[1] - columns[0], []).append(Strip(name, rows, columns))
    table = {}
    for width, some in strips.items():
        shuffled, first = draw(st.permutations(some)), 0
        for first, end in draw(cut(len(shuffled))):
            group = tuple(shuffled[first:end])
            height = sum(strip.height for strip in group)
            shape = draw(st.sampled_from([s for s in shapes(height, width) if len(s) < 4]))
            padding = draw(st.integers(0, 3))
            if padding and len(shape) < 3:
                shape = (shape[0] + padding, *shape[1:])
            table[f"theirs{len(table)}"] = Theirs(shape, group)
    return ours, table


def shapes(height: int, width: int) -> list[tuple[int, ...]]:
    """Shapes of as many rows: a matrix, a stack of matrices, and of single columns a vector or a stack of these."""
    found: list[tuple[int, ...]] = [(height, width)]
    found += [(n, height // n, width) for n in range(1, height + 1) if height % n == 0]
    if width == 1:
        found += [(height,), *((n, height // n) for n in range(1, height + 1) if height % n == 0)]
    return found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.sampled_from(["float32", "bfloat16", "float16"]), st.data())
def test_forward_then_backward_is_the_identity(
    tmp_path: Path, layout: tuple[dict[str, Weight], dict[str, Theirs]], dtype: str, data: st.DataObject
) -> None:
    ours, table = layout
    kind = getattr(torch, dtype)
    tensors = {name: torch.randn(weight.shape).to(kind) for name, weight in ours.items()}
    there = stored(tmp_path / "ours", {PREFIX + name: tensor for name, tensor in tensors.items()})
    written = {}
    for name, theirs in table.items():
        flat = torch.cat(list(blocks(there, theirs, dtype)))
        written[name] = flat.view(theirs.shape)
    parts = {name: data.draw(cut(theirs.shape[0])) for name, theirs in table.items()}
    raw = stored(tmp_path / "theirs", written, parts)
    index = under_our_names(raw.index, table, ours, PREFIX)
    back = Reader(tmp_path, index, raw.sizes)
    found = {PREFIX + name: torch.zeros(weight.shape, dtype=kind) for name, weight in ours.items()}
    back.fill(found)
    for name, tensor in tensors.items():
        assert torch.equal(found[PREFIX + name], tensor)


def test_experts_of_other_programs_are_parts_of_a_stack(tmp_path: Path) -> None:
    """Each expert is a matrix by itself, or rows of one for all."""
    ours = {"experts": Weight((3, 2, 5), roles.UP_PROJECTION)}
    apart = {f"experts.{number}": torch.randn(2, 5) for number in range(3)}
    table = {
        name: Theirs((2, 5), (part("experts", ours["experts"], (2 * n, 2 * n + 2)),)) for n, name in enumerate(apart)
    }
    raw = stored(tmp_path / "apart", apart)
    whole = Theirs((6, 5), (part("experts", ours["experts"]),))
    back = Reader(tmp_path, under_our_names(raw.index, table, ours, PREFIX), raw.sizes)
    found = torch.zeros(3, 2, 5)
    back.fill({PREFIX + "experts": found})
    assert torch.equal(found, torch.stack([*apart.values()]))
    assert torch.equal(torch.cat(list(blocks(back, whole, "float32"))), found.flatten())


def stored(file: Path, tensors: dict[str, Tensor], parts: dict[str, list[tuple[int, int]]] | None = None) -> Reader:
    """The tensors in a file, each in parts of some rows."""
    chunks, content = [], b""
    for name, tensor in tensors.items():
        for first, end in (parts or {}).get(name, [(0, len(tensor))]):
            part = tensor[first:end].contiguous()
            offsets = (first, *[0] * (tensor.dim() - 1))
            dtype = str(tensor.dtype).removeprefix("torch.")
            chunks.append(Chunk(name, dtype, tensor.shape, file.name, len(content), offsets, part.shape))
            content += part.view(torch.uint8).numpy().tobytes()
    file.write_bytes(content)
    return Reader(file.parent, Index.of(chunks), {file.name: len(content)})
