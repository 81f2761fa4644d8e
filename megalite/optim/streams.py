"""Streaming: buckets of optimizer states pass through the device, where an update changes them.

Each bucket is copied in, updated and copied out. Copies in and out have a stream each, so that a bucket arrives and
another one leaves while one is updated. The device waits for copies, the host does not.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.plan.state_streams import DEVICE_SLOTS, padded

Bucket = Sequence[Tensor]  # local states, or contiguous parts of them


class Source(Protocol):
    """The buckets of a pass in host memory. Its methods are called for numbers of buckets in ascending order."""

    buckets: Sequence[Bucket]

    def ready(self, number: int) -> Sequence[Tensor]:
        """The states of a bucket in host memory, as bytes. Waits until they are there."""

    def changed(self, number: int, copied: torch.cuda.Event | None) -> None:
        """Take note that the tensors of `ready` have new values, once the event has happened."""

    def end(self) -> None:
        """Wait until all buckets are where they live."""


class Resident:
    """A `Source` of buckets that live in host memory."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets

    def ready(self, number: int) -> Sequence[Tensor]:
        return [as_bytes(state) for state in self.buckets[number]]

    def changed(self, number: int, copied: torch.cuda.Event | None) -> None:
        pass

    def end(self) -> None:
        pass


class Streams:
    """The streams on which buckets are copied to and from one device. CUDA is not used on a CPU."""

    def __init__(self) -> None:
        self._inward: torch.cuda.Stream | None = None  # None until there is a GPU
        self._outward: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None  # end of the latest copy to the host

    def stream(self, source: Source, device: torch.device, slot_bytes: int) -> Iterator[list[Tensor]]:
        """Yield each bucket's states on the device, to be changed in place until the next are asked for.

        The iterator must be exhausted, which waits for `source`. slot_bytes: at least the bytes of every bucket, each
        of its tensors `padded`.
        """
        if not source.buckets:
            return
        slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(DEVICE_SLOTS)]
        left: list[torch.cuda.Event | None] = []  # by bucket: the end of its copy to the host
        if device.type == "cuda":
            if self._inward is None or self._outward is None:
                self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._inward.wait_stream(torch.cuda.current_stream(device))  # which may still use the slots' memory
        for number, bucket in enumerate(source.buckets):
            host = source.ready(number)
            here = split(slots[number % DEVICE_SLOTS], bucket)
            before = left[number - DEVICE_SLOTS] if number >= DEVICE_SLOTS else None
            _wait(_current(device), _copy(host, here, self._inward, before))
            yield [part.view(state.dtype).view(state.shape) for part, state in zip(here, bucket, strict=True)]
            updated = None if self._outward is None else torch.cuda.current_stream(device).record_event()
            left.append(_copy(here, host, self._outward, updated))
            source.changed(number, left[-1])
        self._last = left[-1]
        _wait(_current(device), self._last)  # so the slots' memory is free for what comes next
        source.end()

    def settle(self) -> None:
        """Wait until the host may read what was copied to it."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


def split(slot: Tensor, bucket: Bucket) -> list[Tensor]:
    """The bytes of a slot that each tensor of a bucket has, each from a whole block on."""
    found, first = [], 0
    for state in bucket:
        found.append(slot[first : first + state.nbytes])
        first += padded(state.nbytes)
    return found


def as_bytes(state: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in the same memory."""
    return state.view(-1).view(torch.uint8)


def _copy(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    stream: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
) -> torch.cuda.Event | None:
    """Copy on a stream, after an event; without a stream at once. Returns the end of the copy."""
    _wait(stream, after)
    beside: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with beside:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def _current(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
