"""Cross-entropy of a vocabulary split over ranks, with one collective, against that of the whole."""

from typing import Any

import pytest
import torch
from ranks import SIZE, Ranks
from rounding import DEVICE, numbers_below, random
from torch import Tensor
from vocabulary import collectives, group_of, shards

from megalite_kernels import cross_entropy
from megalite_kernels.cross_entropy import launch_gradient, launch_merge, launch_stats, reference
from megalite_kernels.labels import labels_of

COUNT, VOCABULARY, SCALE = 13, 48, 0.37
IGNORED = -7
OPTIONS: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": 0.1, "z_loss": 0.03, "softcap": 3.0}
Found = tuple[Tensor, Tensor, int, int] | None


def logits() -> Tensor:
    return random(COUNT, VOCABULARY, dtype=torch.float64, seed=0, scale=4.0)


def the_targets(size: int) -> Tensor:
    """The ends of the parts of ranks among them, and what is ignored."""
    edges = torch.arange(size, device=DEVICE) * (VOCABULARY // size)
    rest = numbers_below(VOCABULARY, COUNT - 2 * size, seed=1)
    targets = torch.cat((edges, edges + VOCABULARY // size - 1, rest))
    targets[-1] = IGNORED
    return targets


def part_of(columns: range, width: int) -> Tensor:
    """Logits of these classes and, as padding, a number that would change every sum."""
    part = torch.full((COUNT, width), 1e30, dtype=torch.float64, device=DEVICE)
    part[:, : len(columns)] = logits()[:, columns.start : columns.stop]
    return part


def split(size: int, targets: Tensor, how: str, backend: Any, options: dict[str, Any]) -> Found:
    """In groups of `size` ranks: loss, gradient of this rank's part, collectives in forward and in backward."""
    group = group_of(size)
    if group is None:
        return None
    columns, width = shards(size, VOCABULARY, how)[group.rank()]
    x = part_of(columns, width).requires_grad_()
    given = {"columns": columns, "vocabulary": VOCABULARY} if how != "even" else {}
    counts = [collectives(group)]
    loss = cross_entropy(x, targets, group, backend=backend, **given, **options)
    counts.append(collectives(group))
    (loss * SCALE).backward()
    counts.append(collectives(group))
    assert x.grad is not None
    assert x.grad[:, len(columns) :].eq(0).all()
    return loss.detach(), x.grad[:, : len(columns)], counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("how", ["even", "uneven", "padded", "both"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_vocabulary(size: int, how: str, backend: str, ranks: Ranks) -> None:
    """Groups at other ranks than the first too; the same loss everywhere, to the last bit, for one collective."""
    whole = logits().requires_grad_()
    targets = the_targets(size)
    expected = reference(whole, targets, **OPTIONS)
    (expected * SCALE).backward()
    assert whole.grad is not None
    found = ranks.run(split, size, targets, how, backend, OPTIONS)
    for rank in range(SIZE // size * size):
        loss, gradient, forward, backward = found[rank]
        columns, _ = shards(size, VOCABULARY, how)[rank % size]
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, whole.grad[:, columns.start : columns.stop], rtol=0, atol=1e-12)
        assert torch.equal(loss, found[0][0])
        assert (forward, backward) == (1, 0)


@pytest.mark.parametrize("how", ["even", "uneven", "padded", "both"])
def test_kernels_of_all_ranks_one_after_another(how: str) -> None:
    """On one device, which may be a GPU, without a group: what would be gathered is put together."""
    whole, targets = logits().requires_grad_(), the_targets(4)
    expected = reference(whole, targets, **OPTIONS)
    (expected * SCALE).backward()
    assert whole.grad is not None
    parts, scales = [], torch.full((), SCALE, dtype=torch.float64, device=DEVICE).expand(COUNT)
    for columns, width in shards(4, VOCABULARY, how):
        labels = labels_of(COUNT, width, targets, None, IGNORED, 0.1, 0.03, VOCABULARY, columns, 3.0)
        parts.append((part_of(columns, width), labels))
    stats = torch.stack([launch_stats(x, targets, labels) for x, labels in parts])
    losses, lses = launch_merge(stats, targets, parts[0][1])
    torch.testing.assert_close(losses.sum(), expected.detach(), rtol=1e-12, atol=0)
    for x, labels in parts:
        launch_gradient(x, targets, lses, scales, labels)
        at = slice(labels.first, labels.first + labels.columns)
        torch.testing.assert_close(x[:, : labels.columns], whole.grad[:, at], rtol=0, atol=1e-12)
        assert x[:, labels.columns :].eq(0).all()


def test_one_rank_needs_no_collective(ranks: Ranks) -> None:
    for loss, gradient, forward, backward in ranks.run(split, 1, the_targets(1), "even", "triton", OPTIONS):
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert (forward, backward) == (0, 0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_target_outside_the_split_vocabulary(wrong: int, backend: str, ranks: Ranks) -> None:
    targets = the_targets(4)
    targets[3] = wrong
    for loss, gradient, _, _ in ranks.run(split, 4, targets, "even", backend, {"ignore_index": IGNORED}):
        assert loss.isnan()
        assert gradient.isnan().all(1).tolist() == [row == 3 for row in range(COUNT)]
        assert gradient.isnan().any(1).sum() == 1
