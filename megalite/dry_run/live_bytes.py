"""Live bytes of tensors, counted allocation by allocation while code runs, on real or on fake tensors.

A dispatch mode sees every operation's results. Each storage is counted once, however many tensors view it, from
its first appearance until it dies. Resizing a storage in place, as FSDP2 does with gathered weights, is counted too.
Not counted: what allocators add (rounding, caching, fragmentation), and what kernels allocate internally.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

COUNTED_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)  # other subclasses are first taken apart by their own dispatch


@dataclass
class Block:
    """The life of one storage. A phase is a backward pass, or the time between two backward passes."""

    bytes: int
    kind: str
    born: int
    in_backward: bool
    died: int | None = None


class LiveBytes(TorchDispatchMode):
    """Counts storages while active; `peak` returns the result afterwards.

    fake: count the tensors of this mode, and no others; without it, count real tensors. doing: called at every change,
    says what the code is doing; `busy` tells what it was doing at the peak.

    A block has the kind that `add` gave it. Otherwise its life tells the kind: "activations" were made in forward and
    outlived it, "gradients" were made in a backward pass and outlived it, and all other blocks are "temporaries".
    """

    def __init__(self, fake: FakeTensorMode | None = None, doing: Callable[[], object] = lambda: "") -> None:
        super().__init__()
        self._fake, self._doing = fake, doing
        self._blocks: dict[int, tuple[Block, weakref.ref[UntypedStorage]]] = {}  # by address of the storage
        self._events: list[tuple[Block, int, object]] = []  # changes of a block's size, and what the code was doing
        self._phase, self._task, self._newest = 0, -1, -1  # phase, and autograd's numbers of passes

    def __enter__(self) -> "LiveBytes":
        self._patch = _resizing(self._resized)
        self._patch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in COUNTED_TYPES for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = _known(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        self._follow_phase()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._counts(leaf):
                self._see(leaf.untyped_storage(), "")
        return result

    def add(self, tensors: Iterator[Tensor] | Sequence[Tensor], kind: str) -> None:
        """Count the storages of `tensors` that are not counted yet, and give all of these storages the kind `kind`."""
        for tensor in tensors:
            for part in _parts(tensor):
                if self._counts(part):
                    self._see(part.untyped_storage(), kind)

    def peak(self, apart: Sequence[str] = ()) -> dict[str, int]:
        """Bytes by kind at the moment when most were alive. Each of the kinds `apart` is counted at its own peak."""
        found = self._peak(lambda kind: kind not in apart)
        for each in apart:
            found |= self._peak(each.__eq__)
        return found

    def busy(self, apart: Sequence[str] = ()) -> object:
        """Activity of the code when most bytes were alive, not counting kinds `apart`; "" if none ever were."""
        events = self._until_peak(lambda kind: kind not in apart)
        return events[-1][2] if events else ""

    def _peak(self, counts: Callable[[str], bool]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for kind, change, _ in self._until_peak(counts):
            found[kind] += change
        return {kind: size for kind, size in found.items() if size}

    def _until_peak(self, counts: Callable[[str], bool]) -> list[tuple[str, int, object]]:
        """The changes of the kinds for which `counts` is true, up to the one that makes the most bytes alive."""
        events = [(kind, size, doing) for block, size, doing in self._events if counts(kind := self._kind(block))]
        totals = list(accumulate((change for _, change, _ in events), initial=0))
        return events[: totals.index(max(totals))]

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return sum(change for _, change, _ in self._events)

    def _kind(self, block: Block) -> str:
        if block.kind:
            return block.kind
        if block.born == (self._phase if block.died is None else block.died):
            return "temporaries"
        return "gradients" if block.in_backward else "activations"

    def _counts(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self._fake
        return self._fake is None and tensor.device.type != "meta"

    def _see(self, storage: UntypedStorage, kind: str) -> None:
        address = storage._cdata
        if address not in self._blocks:
            block = Block(0, kind, self._phase, self._task != -1)
            self._blocks[address] = block, weakref.ref(storage, self._freeing(address))
        block = self._blocks[address][0]
        block.kind = kind or block.kind
        self._change(block, storage.nbytes())

    def _change(self, block: Block, size: int) -> None:
        if size != block.bytes:
            self._events.append((block, size - block.bytes, self._doing()))
            block.bytes = size

    def _freeing(self, address: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            self._follow_phase()
            block, _ref = self._blocks.pop(address)
            block.died = self._phase
            self._change(block, 0)

        return free

    def _resized(self, storage: UntypedStorage) -> None:
        if storage._cdata in self._blocks:
            self._change(self._blocks[storage._cdata][0], storage.nbytes())

    def _follow_phase(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and (task == -1 or task > self._newest):  # else a pass beside it has had its turn
            self._phase += 1
        self._task, self._newest = task, max(task, self._newest)


def _known(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation on fake tensors that needs no computing, for which FakeTensorMode takes long; or None.

    It works out a product written to `out` anew every time, in milliseconds: half the time of a rank with experts.
    """
    first = args[0] if args else None
    if not isinstance(first, FakeTensor):
        return None
    if func is torch.ops.prim.device.default:
        return first.fake_device
    if func is torch.ops.aten.addmm.out:
        (_, left, right), out = args, kwargs["out"]
        assert left.shape[1] == right.shape[0], (left.shape, right.shape)
        assert out.shape == (left.shape[0], right.shape[1]), (out.shape, left.shape, right.shape)
        return out
    return None


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a DTensor or another wrapper is made of."""
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (part for part in inner if isinstance(part, Tensor) for part in _parts(part))
    else:
        yield tensor


@contextmanager
def _resizing(seen: Callable[[UntypedStorage], None]) -> Iterator[None]:
    """Call `seen` with every storage resized in place. Resizing is not an operation, so no dispatch mode sees it."""
    original = UntypedStorage.resize_

    def resize(storage: UntypedStorage, size: int) -> UntypedStorage:
        result = original(storage, size)
        seen(storage)
        return result

    UntypedStorage.resize_ = resize  # type: ignore
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore
