"""Bytes of live storages: what is counted, when, and as what."""

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.dry_run.live_bytes import LiveBytes


@pytest.fixture
def live() -> Iterator[LiveBytes]:
    with LiveBytes() as counting:
        yield counting


def test_a_storage_counts_once_and_as_long_as_anything_views_it(live: LiveBytes) -> None:
    x = torch.zeros(1000)
    part = x[10:20].view(2, 5)
    assert live.live == 4000
    del x
    assert live.live == 4000
    del part
    assert live.live == 0
    assert live.peak() == {"temporaries": 4000}


def test_results_in_place_and_out_take_nothing_new(live: LiveBytes) -> None:
    x, y = torch.ones(1000), torch.ones(1000)
    x.add_(y).mul_(2)
    torch.add(x, y, out=y)
    assert live.live == 8000


def test_a_product_written_to_a_fake_tensor_must_fit_it() -> None:
    fake = FakeTensorMode()
    with fake, LiveBytes(fake) as counting:
        x, y, out = torch.ones(3, 5), torch.ones(5, 7), torch.ones(4, 7)
        before = counting.live
        assert torch.addmm(out[:3], x, y, out=out[:3]).shape == (3, 7)
        assert counting.live == before
        for left, right in ((x, y), (torch.ones(4, 6), y), (torch.ones(4, 5), y[:, 1:])):
            with pytest.raises(AssertionError):
                torch.addmm(out, left, right, out=out)


def test_resizing_a_storage_is_seen(live: LiveBytes) -> None:
    x = torch.zeros(1000)
    x.untyped_storage().resize_(0)
    assert live.live == 0
    x.untyped_storage().resize_(4000)
    assert live.live == 4000
    assert torch.zeros(1).resize_(500).shape == (500,)
    assert live.peak() == {"temporaries": 6000}


def test_resizing_is_left_alone_afterwards() -> None:
    before = torch.UntypedStorage.resize_
    with LiveBytes():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_what_was_there_before_counts_when_it_is_added() -> None:
    weight, unseen = torch.zeros(100), torch.zeros(50)
    live = LiveBytes()
    live.add([weight, weight.view(10, 10)], "parameters")
    with live:
        unseen.add_(weight[:50])
    assert live.peak() == {"parameters": 400, "temporaries": 200}


def test_kinds_follow_from_lives() -> None:
    weight = torch.ones(1000, requires_grad=True)
    live = LiveBytes()
    live.add([weight], "parameters")
    with live:
        for _ in range(2):
            kept = (weight * 2).exp()  # the product is freed at once, the result is kept for backward
            kept.sum().backward()
            del kept
        assert weight.grad is not None
        live.add([weight.grad], "gradients")
    peak = live.peak()
    assert peak["parameters"] == peak["gradients"] == 4000
    assert peak["activations"] == pytest.approx(4000, abs=8)
    assert peak["temporaries"] == pytest.approx(8000, abs=8)  # of the second backward, beside the first one's gradient


def test_gradients_that_wait_for_the_next_backward_are_gradients() -> None:
    x = torch.ones(1000, requires_grad=True)
    with LiveBytes() as live:
        (first,) = torch.autograd.grad(x.sin().sum(), x)
        (second,) = torch.autograd.grad(x.sin().sum(), x)
        del first, second
    assert live.peak()["gradients"] >= 4000


def test_a_kind_apart_has_a_peak_of_its_own() -> None:
    with LiveBytes() as live:
        copies = [torch.zeros(100) for _ in range(3)]
        live.add(copies, "host")
        copies.clear()
        x = torch.zeros(500)
        del x
    assert live.peak() == {"temporaries": 2000}
    assert live.peak(apart=("host",)) == {"temporaries": 2000, "host": 1200}


def test_only_the_tensors_of_the_given_mode_count() -> None:
    ours, theirs = FakeTensorMode(), FakeTensorMode()
    live = LiveBytes(ours)
    with theirs, live:
        torch.empty(1 << 40)
    with live:
        torch.zeros(1)
    assert live.peak() == {}
    with ours, live:
        x = torch.empty(1 << 40)
        x = x + 1
    assert live.peak()["temporaries"] == 2 * 4 << 40
    with theirs, LiveBytes() as real:
        torch.empty(1 << 40)
    assert real.peak() == {}
