"""Host memory that a GPU copies to and from by itself: page-locked, and no larger than asked for.

PyTorch hands out page-locked memory in powers of two, up to twice what is needed. Here a block is ordinary memory of
whole pages that is registered with CUDA once, and used again by whatever has the same size.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from mmap import PAGESIZE, mmap
from weakref import finalize

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device

log = logging.getLogger("megalite")


class HostMemory:
    """Blocks for copies of a GPU's tensors, and the stream that copies. Nothing of it touches CUDA on a CPU.

    Blocks stay registered until they are trimmed, or the object or the process ends. Where CUDA refuses to register,
    which is told once, they are PyTorch's page-locked memory.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # None: no tensor of a GPU has been seen
        self.watch: Callable[[Tensor], None] | None = None  # is given all that `empty_like` gives
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self._registered: set[int] = set()  # addresses
        self._refused = False
        finalize(self, _unregister, self._registered)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Contiguous host memory for a copy of `tensor`; ordinary memory where it is on the host already."""
        host = self._empty_like(tensor)
        if self.watch is not None:
            self.watch(host)
        return host

    def _empty_like(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda or tensor.nbytes == 0:
            return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)
        free = self._free.get(tensor.nbytes)
        block = free.pop() if free else self._new(tensor.nbytes, tensor.device)
        return block.view(tensor.dtype).view(tensor.shape)

    def give_back(self, host: Tensor) -> None:
        """Let what `empty_like` gave be used again, by what `stream` does after all that it was told before."""
        if self.stream is not None and host.nbytes:
            self._free.setdefault(host.nbytes, []).append(host.view(-1).view(torch.uint8))

    def trim(self) -> None:
        """Give the system the blocks that nobody uses. Waits for the stream."""
        if self.stream is not None:
            self.stream.synchronize()
        free, self._free = self._free, {}
        addresses = {block.data_ptr() for blocks in free.values() for block in blocks} & self._registered
        self._registered -= addresses
        _unregister(addresses)

    def close(self) -> None:
        """Make ordinary memory of all blocks. Waits for nothing: copies must have ended."""
        self._free.clear()
        _unregister(self._registered)

    def _new(self, size: int, device: torch.device) -> Tensor:
        if not self._refused:
            pages = -(-size // PAGESIZE) * PAGESIZE
            block = torch.frombuffer(mmap(-1, pages), dtype=torch.uint8)
            error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), pages, PORTABLE))
            if error == 0:
                self._registered.add(block.data_ptr())
                return block[:size]
            self._refused = True
            log.warning(
                "CUDA does not register %d bytes of host memory (error %d); PyTorch's page-locked memory is used, "
                "which may take up to twice the bytes",
                pages,
                error,
            )
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # takes the error up; else the next kernel would be blamed for it
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _unregister(addresses: set[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())
