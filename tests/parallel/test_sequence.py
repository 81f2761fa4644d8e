"""Which rank holds which positions, and which blocks of attention follow."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_parts import mask
from context_cases import METHODS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.parallel.blocks import Block, reachable, triangles
from megalite.parallel.sequence import (
    Documents,
    Method,
    Sequences,
    blocks_of_joined,
    gaps,
    joined,
    missing,
    own_blocks,
    ring_steps,
    rows,
    split,
    unsplit,
)
from megalite.plan.parts.window import attended_pairs, halo

CPU = torch.device("cpu")
CP = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, Documents]:
    """A number of ranks, a length that they can share, and documents."""
    cp = draw(CP)
    length = 2 * cp * draw(st.integers(1, 5))
    begins = draw(st.sets(st.integers(1, length - 1)))
    return cp, length, (0, *sorted(begins), length)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, Documents, int]:
    """The same, and a window."""
    cp, length, documents = draw(layouts())
    return cp, length, documents, draw(st.integers(1, length + 2))


def matrix(blocks: list[Block], queries: int, keys: int, flash: bool = False) -> Tensor:
    """How often each query attends to each key; `flash`: by the rule of FlashAttention 2 on CUDA for windows."""
    found = torch.zeros(queries, keys, dtype=torch.int64)
    for block in blocks:
        part = found[block.queries, block.keys]
        pieces = [part[begin:end, begin:end] for begin, end in pairwise(block.documents)] or [part]
        for piece in pieces:
            n, m = piece.shape
            back = torch.arange(n)[:, None] + m - n - torch.arange(m)  # from a query's place to the key
            seen = torch.ones(n, m, dtype=torch.bool) if block.left is None else back <= block.left
            if block.documents:
                seen &= back <= 0 if block.mirrored else back >= 0
            elif flash and block.left is not None and block.left < m:
                seen &= back >= -m  # its kernels take the number of keys for a right end that is not told
            piece += seen
    return found


@given(CP, st.integers(1, 4), st.sampled_from(METHODS))
def test_every_position_is_on_one_rank_and_unsplit_restores_their_order(cp: int, chunk: int, method: Method) -> None:
    whole = torch.arange(2 * cp * chunk * 3).view(-1, 3)
    parts = [split(whole, rows(method, cp, rank, len(whole))) for rank in range(cp)]
    assert {len(part) for part in parts} == {len(whole) // cp}
    assert all((part.diff(dim=0) > 0).all() for part in parts)
    assert torch.equal(unsplit(parts, method), whole)


@given(CP, st.integers(1, 4))
def test_zigzag_balances_the_causal_triangle(cp: int, chunk: int) -> None:
    length = 2 * cp * chunk
    work = {sum(position + 1 for part in rows("ring", cp, rank, length) for position in part) for rank in range(cp)}
    assert len(work) == 1


@given(layouts())
def test_the_steps_of_the_ring_are_the_mask(layout: tuple[int, int, Documents]) -> None:
    cp, length, documents = layout
    sequences = [Sequences(slice(None), documents)]
    held = [rows("ring", cp, rank, length) for rank in range(cp)]
    for rank, mine in enumerate(held):
        steps = [own_blocks(mine, sequences, CPU), *ring_steps(cp, rank, length, sequences)]
        expected = split(mask(length, documents), mine)
        for step, blocks in enumerate(steps):
            theirs = held[(rank - step) % cp]
            found = matrix(blocks, length // cp, length // cp)
            assert torch.equal(found, split(expected.T, theirs).T.long())


@given(layouts())
def test_own_rows_and_the_gaps_between_are_the_mask(layout: tuple[int, int, Documents]) -> None:
    cp, length, documents = layout
    sequences = [Sequences(slice(None), documents)]
    for rank in range(cp):
        mine = rows("all_gather", cp, rank, length)
        found = torch.zeros(length // cp, length, dtype=torch.int64)
        own = matrix(own_blocks(mine, sequences, CPU), length // cp, length // cp)
        found[:, torch.cat([torch.arange(part.start, part.stop) for part in mine])] += own
        for gap, blocks in gaps(mine, sequences):
            found[:, gap.start : gap.stop] += matrix(blocks, length // cp, len(gap))
        assert torch.equal(found, split(mask(length, documents), mine).long())


@given(windows())
def test_with_a_window_own_rows_and_the_gaps_between_are_the_mask(layout: tuple[int, int, Documents, int]) -> None:
    cp, length, documents, window = layout
    sequences = [Sequences(slice(None), documents)]
    for rank in range(cp):
        mine = rows("ring", cp, rank, length)
        position = torch.cat([torch.arange(part.start, part.stop) for part in mine])
        found = torch.zeros(3, length // cp, length, dtype=torch.int64)
        for keys, blocks in [
            (position, own_blocks(mine, sequences, CPU, window)),
            *((torch.arange(gap.start, gap.stop), blocks) for gap, blocks in gaps(mine, sequences, window)),
        ]:
            cut = [part for block in blocks for part in triangles(block)]
            assert all(block.left is None for block in cut)
            on_cuda = matrix(
                [part for block in blocks for part in reachable(block)], length // cp, len(keys), flash=True
            )
            seen = [*(matrix(part, length // cp, len(keys)) for part in (blocks, cut)), on_cuda]
            found[:, :, keys] += torch.stack(seen)
        assert torch.equal(found, split(mask(length, documents, window), mine).long().expand(3, -1, -1))


@given(windows())
def test_a_rank_takes_what_its_windows_reach_and_gives_what_others_take(layout: tuple[int, int, Any, int]) -> None:
    cp, length, _, window = layout
    held = [rows("ring", cp, rank, length) for rank in range(cp)]
    position = torch.arange(length)
    own = torch.stack([torch.isin(position, split(position, mine)) for mine in held])
    reached = torch.stack([split(mask(length, (0, length), window), mine).any(0) for mine in held])
    taken = reached & ~own
    for rank, mine in enumerate(held):
        wanted = [p for part in missing(mine, window) for p in part]
        assert wanted == taken[rank].nonzero()[:, 0].tolist()
        assert halo(cp, rank, length, window) == (taken[:, own[rank]].sum().item(), len(wanted))


@given(st.integers(1, 30), st.none() | st.integers(1, 40))
def test_pairs_are_those_of_the_mask(length: int, window: int | None) -> None:
    assert attended_pairs(length, window) == mask(length, (0, length), window).sum().item()


@given(layouts())
def test_at_most_one_rectangle_reaches_over_to_another_rank(layout: tuple[int, int, Documents]) -> None:
    cp, length, documents = layout
    steps = [ring_steps(cp, rank, length, [Sequences(slice(None), documents)]) for rank in range(cp)]
    assert all(len(blocks) <= 1 and not any(block.documents for block in blocks) for step in steps for blocks in step)


def test_samples_have_documents_of_their_own() -> None:
    sequences = [Sequences(slice(0, 1), (0, 5, 16)), Sequences(slice(1, 2), (0, 16))]
    first, second = own_blocks(rows("ring", 2, 0, 16), sequences, CPU)
    assert (first.samples, first.documents) == (slice(0, 1), (0, 4, 8))  # position 5 is held elsewhere
    assert (second.samples, second.documents) == (slice(1, 2), (0, 8))


@given(st.lists(st.sampled_from([(0, 6), (0, 1, 6), (0, 2, 3, 6)]), min_size=1, max_size=3), st.integers(1, 7))
def test_samples_behind_each_other_have_blocks_of_their_own(documents: list[Documents], window: int) -> None:
    whole = joined(documents)
    for wide in (None, window):
        blocks = blocks_of_joined(6, whole, CPU, wide)
        assert [block.queries for block in blocks] == [slice(6 * i, 6 * i + 6) for i in range(len(documents))]
        found = matrix(blocks, whole[-1], whole[-1])
        expected = torch.block_diag(*(mask(6, cuts, wide) for cuts in documents))
        assert torch.equal(found, expected.long())


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_holds_everything(method: Method) -> None:
    assert rows(method, 1, 0, 7) == (range(7),)
