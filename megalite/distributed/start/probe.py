"""Measurement of what a node or a pair of nodes can do: matrix products, copies to and from the host, all-reduces.

`python -m megalite.distributed.start.probe` is one rank of such a measurement; megalite-preflight starts as
many as there are GPUs and reads the line of JSON that each prints. On CPUs the same code measures with gloo, for tests
and nodes without GPUs.
"""

import argparse
import hashlib
import json
import sys
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

PARTS = ("matmul", "copies", "all_reduce")
SEED = 20
ROUNDS = 10  # timed all-reduces
COPIES = 5  # timed copies, of which the fastest counts
SIZES = {"cuda": 8192, "cpu": 256}  # rows and columns of a matrix product


def main() -> int:
    """Runs the program. Returns the exit code."""
    options = _parser().parse_args()
    device = torch.device(options.device, options.local_rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the host's cores
    parts = options.parts.split(",")
    found: dict[str, Any] = {"rank": options.rank, "versions": versions(device)}
    if "matmul" in parts:
        found |= matmul(device, options.seconds)
    if "copies" in parts:
        found |= copies(device, options.bytes)
    if "all_reduce" in parts:
        _meet(options, device)
        found |= all_reduce(device, options.bytes)
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite.distributed.start.probe", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--parts", default=",".join(PARTS), help=f"what to measure, of {', '.join(PARTS)}")
    add("--rank", type=int, default=0)
    add("--local-rank", type=int, default=0)
    add("--world-size", type=int, default=1)
    add("--store", required=True, help="where ranks meet: HOST:PORT of rank 0, or the path of a file to make")
    add("--seconds", type=float, default=2.0, help="of matrix products")
    add("--bytes", type=int, default=2**30, help="of a copy and of an all-reduce")
    add("--timeout", type=float, default=60.0, help="seconds for which ranks wait for each other")
    return parser


def versions(device: torch.device) -> dict[str, str | None]:
    """The versions that PyTorch tells; of NCCL only where there is a GPU, which it is loaded for."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    return {"torch": torch.__version__, "nccl": nccl}


def matmul(device: torch.device, seconds: float) -> dict[str, Any]:
    """FLOP/s of one square product, repeated for some seconds, and the digest of its bits.

    Equal GPUs with equal software give equal bits; `steady` is whether the last product had those of the first.
    """
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = SIZES[device.type]
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(size, size, generator=generator).to(device, kind) for _ in range(2))
    product = a @ b
    first = _digest(product)
    for _ in range(3):
        torch.matmul(a, b, out=product)
    _finish(device)
    start, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or not done:
        for _ in range(20):
            torch.matmul(a, b, out=product)
        _finish(device)
        done += 20
    return {"matmul": 2 * size**3 * done / spent, "digest": first, "steady": _digest(product) == first}


def copies(device: torch.device, size: int) -> dict[str, float]:
    """Bytes/s from pinned host memory to the device and back."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return {"to_device": _copy_rate(there, host, device), "to_host": _copy_rate(host, there, device)}


def _copy_rate(target: Tensor, source: Tensor, device: torch.device) -> float:
    fastest = float("inf")
    for _ in range(1 + COPIES):  # the first touches memory
        _finish(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _finish(device)
        fastest = min(fastest, time.perf_counter() - start)
    return source.numel() / fastest


def all_reduce(device: torch.device, size: int) -> dict[str, Any]:
    """Bus bandwidth of an all-reduce over all ranks, bytes/s, and whether its sums are right.

    As nccl-tests define it: 2 (n - 1) / n of the tensor pass every link of a ring of n ranks.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((max(1, size // 4),), float(rank + 1), device=device)
    dist.all_reduce(x)
    right = bool((x == ranks * (ranks + 1) / 2).all())
    x.zero_()
    for _ in range(2):
        dist.all_reduce(x)
    _together(device)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(x)
    _finish(device)
    seconds = (time.perf_counter() - start) / ROUNDS
    return {"all_reduce": 2 * (ranks - 1) / ranks * 4 * x.numel() / seconds, "right": right}


def _meet(options: argparse.Namespace, device: torch.device) -> None:
    wait, (rank, ranks) = timedelta(seconds=options.timeout), (options.rank, options.world_size)
    host, colon, port = options.store.rpartition(":")
    store: dist.Store
    if colon:
        store = dist.TCPStore(host, int(port), ranks, rank == 0, wait)
    else:
        store = dist.FileStore(options.store, ranks)
        store.set_timeout(wait)
    backend: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait)


def _together(device: torch.device) -> None:
    _finish(device)
    dist.barrier()
    _finish(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
