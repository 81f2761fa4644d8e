"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), out of place: each pair of features turns by its angle.

    y₁ = x₁ · cos − x₂ · sin        y₂ = x₂ · cos + x₁ · sin        backward: the same with −sin

Half-rotation layout pairs feature i with i + e/2, as Hugging Face's Llama weights do; interleaved layout pairs 2i with
2i + 1, as the paper and Meta's weights do.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from megalite_kernels.backend import Backend, jit, on_device, power_of_2, tl, use_triton, wide_dtype, widen
from megalite_kernels.compile_cases import TOKENS, CompileCase, meta, models

Layout = Literal["half", "interleaved"]

ELEMENTS = 4096  # per program
WARPS = 4


def reference(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | int = 0, layout: Layout = "half") -> Tensor:
    """Multiplies every pair, as a complex number, by its phase, in plain PyTorch."""
    wide = wide_dtype(x.dtype)
    cos, sin = angles_at(cos, sin, positions, len(x))
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if layout == "half" else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.to(wide).contiguous()) * torch.complex(cos.to(wide), sin.to(wide))
    pairs = torch.view_as_real(turned)
    return (pairs.transpose(-1, -2) if layout == "half" else pairs).flatten(-2).to(x.dtype)


def angles_at(cos: Tensor, sin: Tensor, positions: Tensor | int, length: int) -> tuple[Tensor, Tensor]:
    """The rows of both tables for `length` tokens at `positions`."""
    if isinstance(positions, Tensor):
        return cos[positions, 0], sin[positions, 0]
    if len(cos) == length:
        return cos, sin
    return cos[positions : positions + length], sin[positions : positions + length]


class TorchRope(torch.autograd.Function):
    """The rotation of several tensors in plain PyTorch, in three passes forward and three backward."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, layout: Layout, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _turned(given, cos, sin, layout, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, None, *_turned(grads, cos, sin, ctx.layout, -1)


def _turned(given: Iterable[Tensor], cos: Tensor, sin: Tensor, layout: Layout, sign: int) -> tuple[Tensor, ...]:
    """The pairs of all tensors, turned by their angles times `sign`."""
    half, made = layout == "half", []
    for_both = torch.cat((cos, cos), dim=-1) if half else cos.repeat_interleave(2, dim=-1)
    pairs = cos.shape[-1]
    # Slices, as autograd, which may differentiate this, too, lets nobody write to results of `chunk`.
    first, second = (slice(pairs), slice(pairs, None)) if half else (slice(0, None, 2), slice(1, None, 2))
    for x in given:
        y = x * for_both
        y[..., first].addcmul_(x[..., second], sin, value=-sign)
        y[..., second].addcmul_(x[..., first], sin, value=sign)
        # Attention's gradients lie as its kernel has them, and products of others than rows are slow.
        made.append((y if y.dtype == x.dtype else y.to(x.dtype)).contiguous())
        del y  # may be wide, and be in the way of the next
    return tuple(made)


@jit
def load_pairs(
    X, offsets, inside, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both features of every pair of the rows at `offsets`, as [ROWS, PAIRS] each."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        both = widen(tl.load(X + offsets + columns, mask=inside & (columns < 2 * HALF), other=0.0))
        first, second = tl.split(tl.reshape(both, [ROWS, PAIRS, 2]))
    else:
        columns = tl.arange(0, PAIRS)[None, :]
        first = widen(tl.load(X + offsets + columns, mask=inside & (columns < HALF), other=0.0))
        second = widen(tl.load(X + offsets + HALF + columns, mask=inside & (columns < HALF), other=0.0))
    return first, second


@jit
def store_pairs(
    Y, offsets, first, second, inside,
    ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        columns = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), [ROWS, 2 * PAIRS])
        tl.store(Y + offsets + columns, both.to(Y.dtype.element_ty), mask=inside & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, PAIRS)[None, :]
        tl.store(Y + offsets + columns, first.to(Y.dtype.element_ty), mask=inside & (columns < HALF))
        tl.store(Y + offsets + HALF + columns, second.to(Y.dtype.element_ty), mask=inside & (columns < HALF))


@jit
def load_angles(
    Cos, Sin, Positions, at, item, inside, start, table_stride, table_item_stride, at_stride, item_stride,
    HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of the tokens `at` positions of the sequences `item`."""
    if Positions is None:
        position = at + start
    else:
        position = tl.load(Positions + at * at_stride + item * item_stride, mask=inside, other=0)
    offsets = position.to(tl.int64) * table_stride + item * table_item_stride + tl.arange(0, PAIRS)[None, :]
    mask = inside & (tl.arange(0, PAIRS)[None, :] < HALF)
    return widen(tl.load(Cos + offsets, mask=mask, other=0.0)), widen(tl.load(Sin + offsets, mask=mask, other=0.0))


@jit
def load_heads(
    number, X, Cos, Sin, Positions, count, batch, at_stride, item_stride, head_stride,
    start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Block `number` of ROWS of the `count` heads of tokens: offsets, which of them exist, pairs, angles."""
    rows = number * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < count
    token = rows // HEADS
    at, item, head = (token // batch).to(tl.int64), (token % batch).to(tl.int64), rows % HEADS
    cos, sin = load_angles(
        Cos, Sin, Positions, at, item, inside, start, table_stride, table_item_stride,
        positions_at_stride, positions_item_stride, HALF, PAIRS,
    )  # fmt: skip
    offsets = at * at_stride + item * item_stride + head * head_stride
    first, second = load_pairs(X, offsets, inside, ROWS, HALF, PAIRS, INTERLEAVED)
    return rows.to(tl.int64) * (2 * HALF), inside, first, second, cos, sin


@jit
def turn(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@jit
def _rope(
    X, Cos, Sin, Positions, Y, gap, count, batch, at_stride, item_stride, head_stride,
    start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Turns ROWS of the `count` heads of tokens, or turns them back. gap: in Y, between those of two tokens."""
    offsets, inside, first, second, cos, sin = load_heads(
        tl.program_id(0), X, Cos, Sin, Positions, count, batch, at_stride, item_stride, head_stride,
        start, table_stride, table_item_stride, positions_at_stride, positions_item_stride,
        HEADS, ROWS, HALF, PAIRS, INTERLEAVED,
    )  # fmt: skip
    first, second = turn(first, second, cos, -sin if BACK else sin)
    if gap is not None:
        offsets += ((tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]) // HEADS).to(tl.int64) * gap
    store_pairs(Y, offsets, first, second, inside, ROWS, HALF, PAIRS, INTERLEAVED)


def tables(
    cos: Tensor, sin: Tensor, positions: Tensor | None
) -> tuple[tuple[Tensor, Tensor], tuple[int, int, int, int]]:
    """Both tables for the kernels, and the strides of these and of the positions by token and by sequence."""
    cos, sin = cos.contiguous(), sin.contiguous()
    by_item = cos.stride(1) if cos.shape[1] > 1 else 0
    at, item = (0, 0) if positions is None else positions.stride()
    return (cos, sin), (cos.stride(0), by_item, at, item)


def block(x: Tensor) -> dict[str, int]:
    """The block of a program: ROWS heads, each of HALF pairs of features, padded to PAIRS, a power of 2."""
    half = x.shape[-1] // 2
    pairs = power_of_2(half)
    return {
        "HEADS": x.shape[2],
        "ROWS": max(ELEMENTS // (2 * pairs), 1),
        "HALF": half,
        "PAIRS": pairs,
        "num_warps": WARPS,
    }


@on_device
def launch(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, start: int, interleaved: bool, back: bool,
    into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The heads of x, turned or turned back. into: where they are put, heads of a token next to each other."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(x.shape) if into is None else into
    # Between the heads of one token and those of the next. A dimension of one element may have any stride.
    gap = None if into is None else y.stride(1 if y.shape[1] > 1 else 0) - y.shape[2] * y.shape[3]
    angles, strides = tables(cos, sin, positions)
    count, sizes = x.shape[:-1].numel(), block(x)
    if x.numel():
        _rope[(-(-count // sizes["ROWS"]),)](
            x, *angles, positions, y, gap, count, x.shape[1], *x.stride()[:3], start, *strides,
            INTERLEAVED=interleaved, BACK=back, **sizes,
        )  # fmt: skip
    return y


@torch.library.custom_op("megalite::rope", mutates_args=())
def _op(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, start: int, interleaved: bool, back: bool
) -> Tensor:
    return launch(x, cos, sin, positions, start, interleaved, back)


@_op.register_fake
def _(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, start: int, interleaved: bool, back: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, *ctx.how = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    start, interleaved, back = ctx.how
    return _op(dy, *ctx.saved_tensors, start, interleaved, not back), *[None] * 6


_op.register_autograd(_gradients, setup_context=_save)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | int = 0,
    layout: Layout = "half",
    backend: Backend = "auto",
) -> Tensor:
    """Turn the heads of x `[s, b, h, e]` by their positions' angles, out of place.

    cos, sin: tables `[p, 1, 1, e/2]` for all sequences, or `[p, b, 1, e/2]` for each. Their data type may be wider than
    that of x. They get no gradient. positions: the row of the tables for the first token; the s rows from there on are
    used. Or, with tables for all sequences, the position of every token, `[s, b]`. Kernels copy heads whose features
    are not next to each other.
    """
    check(x, cos, sin, positions, layout)
    if not use_triton(backend, x.device):
        (turned,) = TorchRope.apply(*angles_at(cos, sin, positions, len(x)), layout, x)
        return turned
    by_token, start = (positions, 0) if isinstance(positions, Tensor) else (None, positions)
    return _op(x, cos, sin, by_token, start, layout == "interleaved", False)


def check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | int, layout: Layout) -> None:
    """Raises ValueError if these arguments are not valid for `rope`."""
    if layout not in ("half", "interleaved"):
        raise ValueError(f"rope: {layout!r} is no layout; choose half or interleaved")
    length, batch, _, width = x.shape
    batches = (1,) if isinstance(positions, Tensor) else (1, batch)
    fits = cos.dim() == 4 and cos.shape[1] in batches and cos.shape[2:] == (1, width // 2)
    if width % 2 or cos.shape != sin.shape or not fits:
        raise ValueError(
            f"rope: cos {list(cos.shape)} and sin {list(sin.shape)} for x {list(x.shape)} must both be "
            f"[p, {' or '.join(map(str, batches))}, 1, e/2] with an even e"
        )
    if isinstance(positions, Tensor):
        if positions.shape != (length, batch):
            raise ValueError(f"rope: positions {list(positions.shape)} for x {list(x.shape)} must be [s, b]")
    elif not 0 <= positions <= len(cos) - length:
        raise ValueError(f"rope: tokens {positions} to {positions + length} lie outside tables of {len(cos)} positions")


def bytes_moved(tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes moved by forward and by backward: x in, y out. The tables are read once into cache."""
    size = tokens * heads * head_size * dtype.itemsize
    return 2 * size, 2 * size


def compile_cases() -> Iterator[CompileCase]:
    for model, shape, dtype in models():
        cos = meta(TOKENS, 1, 1, shape.head_size // 2, dtype=torch.float32)
        positions = meta(TOKENS, 1, dtype=torch.int64)
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads)):
            x = meta(TOKENS, 1, heads, shape.head_size, dtype=dtype)
            yield CompileCase(f"rope {name}", model, dtype, partial(launch, x, cos, cos, None, 0, False, False))
        yield CompileCase("rope interleaved", model, dtype, partial(launch, x, cos, cos, None, 0, True, False))
        yield CompileCase("rope backward", model, dtype, partial(launch, x, cos, cos, None, 0, False, True))
        part = meta(TOKENS, 1, 2 * shape.kv_heads, shape.head_size, dtype=dtype)[:, :, : shape.kv_heads]
        into = partial(launch, x, cos, cos, None, 0, False, True, part)
        yield CompileCase("rope backward into a part", model, dtype, into)
        in_place = partial(launch, part, cos, cos, None, 0, False, False, part)
        yield CompileCase("rope in place in a part", model, dtype, in_place)
        yield CompileCase("rope of positions", model, dtype, partial(launch, x, cos, cos, positions, 0, False, False))
