"""Rows of tokens brought to the experts that compute them, and back: row places[t, i] is that of token t's choice i.

    spread: row[places[t, i]] = x[t]        collect: y[t] = Σᵢ row[places[t, i]], i in order, in float32 or wider

Every row has one place, so each operation is the gradient of the other, and nothing is added up in any other order. A
program of `spread` reads a token once and writes it to all of its places.

Where some choices have no row, their places are not below the number of rows. Rows that no choice has are not written
by `spread`, nor read by `collect`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, as_rows, jit, on_device, row_block, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, mixtures
from megalite_kernels.swiglu import program_for


def _spread(x: Tensor, places: Tensor, count: int | None) -> Tensor:
    rows = x.new_empty(places.numel() if count is None else count + 1, x.shape[-1])  # one more, for who has none
    rows[places if count is None else places.clamp(max=count)] = x.unsqueeze(-2)
    return rows[:count]


def _collect(rows: Tensor, places: Tensor, gaps: bool) -> Tensor:
    def taken(place: Tensor) -> Tensor:
        if not gaps:
            return rows[place]
        missing = (place >= len(rows))[..., None]
        return rows[place.clamp(max=len(rows) - 1)].masked_fill_(missing, 0)

    first, *others = places.unbind(-1)
    if not others:
        return taken(first)
    total = taken(first).to(wide_dtype(rows.dtype))
    for place in others:
        total += taken(place)
    return total.to(rows.dtype)


class _TorchSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, count: int | None) -> Tensor:
        ctx.places, ctx.gaps = places, count is not None  # see `_TorchCollect`
        return _spread(x, places, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _collect(grad, ctx.places, ctx.gaps), None, None


class _TorchCollect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, gaps: bool) -> Tensor:
        # Not among saved tensors, so nobody makes or fetches them again: the caller has them anyway. And full recompute
        # ends with the last saved tensor, so what brings rows back need not run.
        ctx.places, ctx.count = places, len(rows) if gaps else None
        return _collect(rows, places, gaps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _spread(grad, ctx.places, ctx.count), None, None


@jit
def _spread_rows(
    X, Places, Rows, count, width, stride, rows, CHOICES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    tiles = tl.cdiv(width, TILE)
    tokens = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)[None, :]
    inside = (tokens < count)[:, None] & (columns < width)
    x = tl.load(X + tokens[:, None] * stride + columns, mask=inside)
    for choice in tl.static_range(CHOICES):
        places = tl.load(Places + tokens * CHOICES + choice, mask=tokens < count, other=0)
        tl.store(Rows + places[:, None] * width + columns, x, mask=inside & (places < rows)[:, None])


@jit
def _collect_rows(
    Rows, Places, Y, count, width, stride, rows, CHOICES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    tiles = tl.cdiv(width, TILE)
    tokens = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)[None, :]
    inside = (tokens < count)[:, None] & (columns < width)
    places = tl.load(Places + tokens * CHOICES, mask=tokens < count, other=0)
    taken = inside & (places < rows)[:, None]
    total = widen(tl.load(Rows + places[:, None] * stride + columns, mask=taken, other=0.0))
    for choice in tl.static_range(1, CHOICES):
        places = tl.load(Places + tokens * CHOICES + choice, mask=tokens < count, other=0)
        taken = inside & (places < rows)[:, None]
        total += widen(tl.load(Rows + places[:, None] * stride + columns, mask=taken, other=0.0))
    tl.store(Y + tokens[:, None] * width + columns, total.to(Y.dtype.element_ty), mask=inside)


@on_device
def launch_spread(x: Tensor, places: Tensor, count: int) -> Tensor:
    rows = x.new_empty(count, x.shape[-1])
    _launch(_spread_rows, as_rows(x), places, rows, count)
    return rows


@on_device
def launch_collect(rows: Tensor, places: Tensor) -> Tensor:
    y = rows.new_empty(*places.shape[:-1], rows.shape[-1])
    _launch(_collect_rows, as_rows(rows), places, y, len(rows))
    return y


def _launch(kernel: Any, source: Tensor, places: Tensor, into: Tensor, rows: int) -> None:
    choices, width = places.shape[-1], source.shape[1]
    count = places.numel() // choices
    block = row_block(width, program_for(source.itemsize))
    if programs := -(-count // block["ROWS"]) * -(-width // block["TILE"]):
        kernel[(programs,)](
            source, places.contiguous(), into, count, width, source.stride(0), rows, CHOICES=choices, **block
        )  # fmt: skip


@torch.library.custom_op("megalite::spread_rows", mutates_args=())
def _spread_op(x: Tensor, places: Tensor, count: int) -> Tensor:
    return launch_spread(x, places, count)


@_spread_op.register_fake
def _(x: Tensor, places: Tensor, count: int) -> Tensor:
    return x.new_empty(count, x.shape[-1])


@torch.library.custom_op("megalite::collect_rows", mutates_args=())
def _collect_op(rows: Tensor, places: Tensor) -> Tensor:
    return launch_collect(rows, places)


@_collect_op.register_fake
def _(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty(*places.shape[:-1], rows.shape[-1])


def _remember_places(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    """See `_TorchCollect`."""
    ctx.places = inputs[1]


def _remember_rows(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.places, ctx.count = inputs[1], len(inputs[0])


def _gradient_of_spread(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _collect_op(grad, ctx.places), None, None


def _gradient_of_collect(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _spread_op(grad, ctx.places, ctx.count), None


_spread_op.register_autograd(_gradient_of_spread, setup_context=_remember_places)
_collect_op.register_autograd(_gradient_of_collect, setup_context=_remember_rows)


def spread_rows(x: Tensor, places: Tensor, backend: Backend = "auto", count: int | None = None) -> Tensor:
    """Rows `[nK, d]` of tokens `[…, d]`: each at its `places` `[…, K]`, which are all numbers below nK, int64.

    count: of rows, where choices without one have places from that number on; None: all choices have one.
    """
    if x.shape[:-1] != places.shape[:-1]:
        raise ValueError(f"spread_rows: x {list(x.shape)} and places {list(places.shape)} must have the same tokens")
    if use_triton(backend, x.device):
        return _spread_op(x, places, places.numel() if count is None else count)
    rows: Tensor = _TorchSpread.apply(x, places, count)
    return rows


def collect_rows(rows: Tensor, places: Tensor, backend: Backend = "auto", gaps: bool = False) -> Tensor:
    """Sums `[…, d]` of the rows `[nK, d]` at the `places` `[…, K]` of every token, as of `spread_rows`.

    gaps: there are choices without a row, and perhaps fewer rows.
    """
    if rows.dim() != 2 or (len(rows) != places.numel() and not gaps):
        raise ValueError(f"collect_rows: rows {list(rows.shape)} must be as many as places {list(places.shape)}")
    if use_triton(backend, rows.device):
        return _collect_op(rows, places)
    collected: Tensor = _TorchCollect.apply(rows, places, gaps)
    return collected


def bytes_moved(tokens: int, choices: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward and by backward of either operation: tokens, their rows, and the places of these."""
    size = tokens * ((1 + choices) * width * dtype.itemsize + choices * torch.int64.itemsize)
    return size, size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in mixtures():
        x, rows = (meta(count, shape.width, dtype=dtype) for count in (TOKENS, shape.rows))
        places = meta(TOKENS, shape.active, dtype=torch.int64)
        yield CompileCase("spread_rows", model, dtype, partial(launch_spread, x, places, shape.rows))
        yield CompileCase("collect_rows", model, dtype, partial(launch_collect, rows, places))
