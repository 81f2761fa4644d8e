"""Page-locked host memory, which a GPU copies to and from without the host's help, in blocks of the size asked for.

PyTorch's page-locked memory comes in powers of two, up to twice the bytes needed. Here, a block is ordinary memory of
whole pages. It is registered with CUDA once, and used again for tensors of the same size.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from mmap import PAGESIZE, mmap
from weakref import finalize

import torch
from torch import Tensor

PORTABLE_FLAG = 1  # cudaHostRegisterPortable: page-locked for every device

log = logging.getLogger("megalite")


class HostMemory:
    """Blocks of host memory for copies of a GPU's tensors, and the stream that copies. CUDA is not used on a CPU.

    Blocks stay registered until they are trimmed, or until this object or the process ends. If CUDA refuses to register
    memory, a warning is logged once, and blocks are PyTorch's page-locked memory from then on.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # None until there is a tensor on a GPU
        self.watch: Callable[[Tensor], None] | None = None  # called with every result of `empty_like`
        self._free: dict[int, list[Tensor]] = {}  # by bytes
        self._registered: set[int] = set()  # addresses
        self._refused = False
        finalize(self, _unregister, self._registered)

    def empty_like(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """Contiguous host memory of the size of `tensor`, for copies to and from a device; ordinary memory on a CPU.

        device: None: the tensor's own.
        """
        host = self._empty_like(tensor, device or tensor.device)
        if self.watch is not None:
            self.watch(host)
        return host

    def _empty_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda" or tensor.nbytes == 0:
            return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        free = self._free.get(tensor.nbytes)
        block = free.pop() if free else self._new(tensor.nbytes, device)
        return block.view(tensor.dtype).view(tensor.shape)

    def give_back(self, host: Tensor) -> None:
        """Return a block of `empty_like` for reuse by later work on `stream`; earlier work there may still read it."""
        if self.stream is not None and host.nbytes:
            self._free.setdefault(host.nbytes, []).append(host.view(-1).view(torch.uint8))

    def trim(self) -> None:
        """Return unused blocks to the operating system. Waits for the stream."""
        if self.stream is not None:
            self.stream.synchronize()
        free, self._free = self._free, {}
        addresses = {block.data_ptr() for blocks in free.values() for block in blocks} & self._registered
        self._registered -= addresses
        _unregister(addresses)

    def close(self) -> None:
        """Unregister all blocks, which become ordinary memory. Does not wait: copies must have ended before."""
        self._free.clear()
        _unregister(self._registered)

    def _new(self, size: int, device: torch.device) -> Tensor:
        if not self._refused:
            pages = -(-size // PAGESIZE) * PAGESIZE
            block = torch.frombuffer(mmap(-1, pages), dtype=torch.uint8)
            block[::PAGESIZE] = 0  # has the pages made here: CUDA would make them one by one, and hold a lock meanwhile
            error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), pages, PORTABLE_FLAG))
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
                torch.zeros(1, device=device)  # clears the error, which the next kernel would report otherwise
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _unregister(addresses: set[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())
