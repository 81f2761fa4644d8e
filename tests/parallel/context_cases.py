"""What runs on the ranks in the tests of context parallelism; attention with an explicit mask is the oracle."""

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from attention_parts import FULL, oracle
from torch import Tensor

from megalite.config.layers import Scores
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.dry_run.live_bytes import LiveBytes
from megalite.parallel.context import attention
from megalite.parallel.sequence import Documents, Method, rows, split, unsplit
from megalite.plan.parts.context import bytes_sent
from megalite_tools.bench.context import attend, configuration, counted_bytes

CPU = torch.device("cpu")
METHODS: tuple[Method, ...] = ("ring", "ulysses", "all_gather")


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison."""

    method: Method
    cp: int
    heads: int
    kv_heads: int
    documents: bool
    length: int
    kind: Scores = FULL
    samples: int = 2
    head_size: int = 4


def cases() -> list[Case]:
    """Every method on 2, 4 and 8 ranks, with and without documents, from as many kv heads as query heads to one.

    Then with windows around the length of a chunk, and with capped and scaled scores.
    """
    found = []
    for method, cp, documents in product(METHODS, (2, 4, 8), (False, True)):
        for heads, kv_heads in ((8, 8), (8, 2), (24, 6), (8, 1)):
            found.append(Case(method, cp, heads, kv_heads, documents, 6 * 2 * cp))
    windows = product(METHODS, (2, 4), (1, 2, 5, 6, 7, 20, 100))  # a chunk has 6 positions
    for i, (method, cp, window) in enumerate(windows):
        kind = Scores(window, 1.5 if i % 3 == 0 else None, sinks=i % 4 == 1)
        found.append(Case(method, cp, 8, 2, i % 2 == 0, 6 * 2 * cp, kind))
    for kind in (Scores(None, 1.5), Scores(scale=0.1), Scores(5, None, 0.1), Scores(sinks=True)):
        found += [Case(method, 2, 8, 2, False, 6 * 2 * 2, kind) for method in METHODS]
    return found


def documents(case: Case) -> list[Documents] | None:
    """Documents of random length, some shorter than a rank's part and some that span several."""
    if not case.documents:
        return None
    choose = random.Random(f"{case}")
    inner = range(1, case.length)
    counts = [choose.choice((0, 1, 2, 5, len(inner) // 2)) for _ in range(case.samples)]
    return [(0, *sorted(choose.sample(inner, count)), case.length) for count in counts]


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, the gradient of the output, and sinks if there are any."""
    generator = torch.Generator().manual_seed(case.cp)

    def random_heads(count: int) -> Tensor:
        shape = (case.length, case.samples, count, case.head_size)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    found = [random_heads(count) for count in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    return [*found, torch.linspace(-3, 3, case.heads, dtype=torch.float64)] if case.kind.sinks else found


def differences(case: Case) -> list[float]:
    """Of output, dq, dk, dv and those of sinks, of all ranks together: the largest difference from the oracle's."""
    mesh = Mesh.build(Layout(cp=case.cp), CPU)
    if mesh is None:
        return []
    bounds = documents(case)
    mine = rows(case.method, case.cp, mesh.coordinates["cp"], case.length)
    *leaves, grad = (split(x, mine) for x in inputs(case)[:4])
    sinks = [each.requires_grad_() for each in inputs(case)[4:]]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = attention(case.method, mesh.cp, case.length, CPU, bounds, case.kind)(*leaves, *sinks)
    y.backward(grad)
    whole = [leaf.requires_grad_() for leaf in (*inputs(case)[:3], *inputs(case)[4:])]
    expected = oracle(*whole[:3], bounds, case.kind, *whole[3:])
    expected.backward(inputs(case)[3])
    found = [joined(each.detach(), mesh, case.method) for each in (y, *(leaf.grad for leaf in leaves))]
    for each in sinks:
        dist.all_reduce(each.grad, group=mesh.cp)
        found.append(each.grad)
    pairs = zip(found, [expected, *(leaf.grad for leaf in whole)], strict=True)
    return [(mine - theirs).abs().max().item() for mine, theirs in pairs]


def joined(x: Tensor, mesh: Mesh, method: Method) -> Tensor:
    """The parts of all ranks in the order of the unsplit sequence."""
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(mesh.layout.cp)]
    dist.all_gather(parts, x.contiguous(), group=mesh.cp)
    return unsplit(parts, method)


def all_differences() -> list[tuple[Case, list[float]]]:
    return [(case, differences(case)) for case in cases()]


Moved = tuple[int, int]  # in forward and in backward


def traffic(method: Method, cp: int, precision: str, window: int | None = None) -> tuple[Moved, Moved] | None:
    """Bytes sent: as counted on this rank, and as predicted."""
    mesh = Mesh.build(Layout(cp=cp), CPU)
    if mesh is None:
        return None
    config = configuration(method, cp, 16 * cp, precision)
    run = attend(config, mesh, Scores(window))
    with counted_bytes(cp) as found:
        y = run()
        forward = sum(found)
        y.backward(torch.ones_like(y))
    return (forward, sum(found) - forward), bytes_sent(config, window)


def all_traffic() -> dict[str, Any]:
    return {f"{case}": traffic(*case) for case in product(METHODS, (2, 8), ("fp64", "bf16"))}


def windows_traffic() -> dict[str, Any]:
    """With windows of one position, of less than a chunk of 8, of more, and of all."""
    cases = product(("ring", "all_gather"), (2, 4, 8), ("fp64", "bf16"), (1, 4, 9, 10, 40, 1000))
    return {f"{case}": traffic(*case) for case in cases}


def peak(method: Method, cp: int, window: int | None = None) -> int | None:
    """Bytes that attention forward and backward hold at most, beside its inputs, of 64 positions on every rank."""
    mesh = Mesh.build(Layout(cp=cp), CPU)
    if mesh is None:
        return None
    run = attend(configuration(method, cp, 64 * cp, "fp64"), mesh, Scores(window))
    with LiveBytes() as live:
        y = run()
        y.backward(torch.ones_like(y))
    return sum(live.peak().values())


def all_peaks() -> dict[tuple[Method, int, int | None], int | None]:
    return {case: peak(*case) for case in product(METHODS, (2, 4, 8), (None, 16))}
