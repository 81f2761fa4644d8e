"""Matrix products with a backward for tensor parallelism and for schedules that split backward.

Layers that share an input are computed by one function, which prepares the input once. Where copies of their weights
lie one after another, products take these as one weight. If tensor parallelism gathers the input along the sequence,
the rank saves only its own part, and backward gathers it again while the first matrix products run (Korthikanti et al.
2022, arXiv 2205.05198, §4.2.2). A long input is gathered in pieces, so that forward waits for the first alone, or while
it is multiplied (`symmetric`). If a schedule splits backward, gradients of weights are put off until the schedule asks
for them (Qi et al., arXiv 2401.10241).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.distributed.collectives import Pending, all_gather, start_gather, start_reduce_scatter
from megalite.parallel.parameter import add_gradient, copy_of, in_use, joint_copy, part, sum_of_gradients
from megalite.parallel.product import PLAIN_PRODUCT, Prepared, Product, add_weight_gradient, sum_over_tokens
from megalite.parallel.symmetric import gathered_products, scattered_product
from megalite.plan.parts.pieces import pieces


class WeightGradients:
    """Collects the weight gradients that the layers of one stage put off."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = None

    @contextmanager
    def put_off(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, backward computes no weight gradients. It adds functions that compute them to the list."""
        waiting: list[Callable[[], None]] = []
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def later(self, make: Callable[[], None]) -> bool:
        """Put off the call of `make` if gradients are being put off. Returns whether it was put off."""
        if self._waiting is None:
            return False
        self._waiting.append(make)
        return True


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    gradients: WeightGradients | None = None,
    product: Product = PLAIN_PRODUCT,
    factor: float = 1.0,
    biases: Sequence[Tensor] = (),
    symmetric: bool = False,
) -> Sequence[Tensor]:
    """factor · x Wᵀ + b for every weight; with a `group`, x is first gathered over it along the sequence.

    x `[s/t, b, in]`, or `[…, in]` without a group. weights: sharded parameters, `[out, in]` on this rank. gradients:
    collects the weight gradients that a split backward puts off; None: backward always computes them at once. Weights
    that are not trained get no gradients. biases: one for every weight, `[out]` on this rank; (): there are none.
    symmetric: fuse PyTorch's products with the collectives of the group.
    """
    # The compiler can trace no gradients put off, and itself decides what runs beside a collective.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        prepared = product.prepare(x)
        whole = tuple(each if group is None or not each.ndim else all_gather(each, group) for each in prepared)
        pairs = zip(weights, biases or repeat(None), strict=False)
        return [product.forward(whole, product.prepare_weight(w, part(w)), factor, bias) for w, bias in pairs]
    others = None if group is None or group.size() == 1 else group  # a rank alone has nothing to gather
    fused = symmetric and others is not None and product is PLAIN_PRODUCT and factor == 1
    return _Linears.apply(x, others, gradients, product, factor, fused, len(weights), *weights, *biases)


class _Linears(torch.autograd.Function):
    """Autograd gets gradients of x and biases: backward adds those of weights to `.grad`, whichever pass makes them.

    The weights are inputs all the same, so that outputs require gradients where x does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup | None,
        gradients: WeightGradients | None,
        product: Product,
        factor: float,
        fused: bool,
        count: int,
        *given: Any,
    ) -> tuple[Tensor, ...]:
        """given: `count` weights, then as many biases or none."""
        params, biases = given[:count], given[count:]
        ctx.group, ctx.gradients, ctx.product, ctx.factor = group, gradients, product, factor
        ctx.params, ctx.count, ctx.fused = params, count, fused
        mine, joint = product.prepare(x), joint_copy(params) if product is PLAIN_PRODUCT else None
        weights = [in_use(param) for param in params] if joint is None else [joint.weight]
        added = biases or (None,) * count if joint is None else [joint.bias]
        wanted = ctx.needs_input_grad[7 : 7 + count]
        kept = mine if any(wanted) else ()  # inputs are for the gradients of weights alone
        ctx.inputs = len(kept)
        ctx.save_for_backward(*kept, *weights)

        def outputs(whole: Prepared) -> tuple[Tensor, ...]:
            # Prepared one after another: a weight in four bits takes its whole size then.
            each = zip(params, weights, added, strict=False)
            return tuple([product.forward(whole, product.prepare_weight(p, w), factor, bias) for p, w, bias in each])

        ranks = 1 if group is None else group.size()
        if fused:
            assert group is not None
            made = tuple(gathered_products(x, [weight.t() for weight in weights], group)[1])
            for y, bias in zip(made, added, strict=True):
                if bias is not None:
                    y += bias
        elif ranks == 1 or product is not PLAIN_PRODUCT or (n := pieces(len(x), x.nbytes * ranks)) == 1:
            made = outputs(_gather(mine, group)())
        else:
            made = products_of_pieces([_gather((piece,), group) for piece in x.chunk(n)], ranks, outputs)
        ctx.rows = None if joint is None else joint.rows
        made = made if joint is None else made[0].split(joint.rows, dim=-1)
        return tuple([y.detach() for y in made])  # no views: FSDP2 warns of one that a module returns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: full recompute unpacks them
        x, weights = saved[: ctx.inputs], saved[ctx.inputs :]
        if ctx.gradients is not None:  # put off with the graph that has made it, x would keep the stage's input until W
            x = tuple(each.detach() for each in x)
        group, product, factor, params = ctx.group, ctx.product, ctx.factor, ctx.params
        wanted, prepared = ctx.needs_input_grad[7:], [product.prepare_gradient(grad) for grad in grads]
        trained = [(param, grad) for param, grad, each in zip(params, prepared, wanted, strict=False) if each]
        make = partial(accumulate, trained, lambda: _gather(x, group)(), product, factor)
        put_off = not trained or (ctx.gradients is not None and ctx.gradients.later(make))
        inputs = None if put_off else _gather(x, group)
        joined = None if ctx.rows is None else _joined(grads)
        if joined is not None:
            prepared, params = [product.prepare_gradient(joined)], params[:1]
        elif ctx.rows is not None:
            weights = weights[0].split(ctx.rows)
        of_x = scattered = None
        fused = ctx.fused and len(prepared) == 1  # the operation takes one product
        if fused and ctx.needs_input_grad[0]:
            of_x = scattered_product(prepared[0][0], weights[0], group)
        elif ctx.needs_input_grad[0]:
            for grad, param, weight in zip(prepared, params, weights, strict=True):
                of_x = product.input_gradient(grad, product.prepare_weight(param, weight), of_x, factor)
        if group is not None and of_x is not None and not fused:
            scattered = start_reduce_scatter(of_x, group)
        if inputs is not None:
            accumulate(trained, inputs, product, factor)
        of_biases: Sequence[Tensor | None] = ()
        if (of_each := wanted[ctx.count :]) and joined is not None:  # in one pass
            of_biases = sum_over_tokens(joined).split(ctx.rows)
        elif of_each:
            of_biases = [sum_over_tokens(grad) if each else None for grad, each in zip(grads, of_each, strict=True)]
        return (of_x if scattered is None else scattered.wait(), *(None,) * (6 + ctx.count), *of_biases)


def products_of_pieces(
    started: Sequence[Callable[[], Prepared]], ranks: int, products: Callable[[Prepared], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The products `[s, …]` of an input that arrives in pieces: those of one are computed while the next is gathered.

    started: functions that wait for a piece, `[s/n, …]`, with an equal run of positions of every rank. products: of a
    piece.
    """
    wholes: list[Tensor] = []
    for index, wait in enumerate(started):
        made = products(wait())
        wholes = wholes or [y.new_empty(len(y) * len(started), *y.shape[1:]) for y in made]
        for whole, y in zip(wholes, made, strict=True):
            whole.unflatten(0, (ranks, len(started), -1))[:, index] = y.unflatten(0, (ranks, -1))
    return tuple(wholes)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor `[…, Σn]` of `parts` `[…, n]`, if they lie in it one behind the other; None: they do not."""
    storage = parts[0].untyped_storage()._cdata
    if any(each.untyped_storage()._cdata != storage for each in parts[1:]):
        return None
    rows = [each.flatten(0, -2) for each in parts]
    (apart, step), begin, width = rows[0].stride(), rows[0].storage_offset(), 0
    for each in rows:
        if each.stride() != (apart, step) or each.storage_offset() != begin + width:
            return None
        width += each.shape[-1]
    if step != 1 or apart < width:
        return None
    return rows[0].as_strided((len(rows[0]), width), (apart, 1)).unflatten(0, parts[0].shape[:-1])


def _gather(x: Prepared, group: dist.ProcessGroup | None) -> Callable[[], Prepared]:
    """Start to gather inputs along the sequence. Returns a function that waits for them."""
    if group is None:
        return lambda: x
    started = [start_gather(each, group) if each.ndim else Pending(each, None) for each in x]
    return lambda: tuple(each.wait() for each in started)


def accumulate(
    trained: Sequence[tuple[DTensor, Prepared]], inputs: Callable[[], Prepared], product: Product, factor: float
) -> None:
    """Compute and add weight gradients. trained: weights, and the prepared gradients of their outputs."""
    whole = product.prepare_kept(inputs())
    has_copies = copy_of(trained[0][0]) is not None  # all parameters or none
    for param, grad in trained:
        if has_copies:
            add_weight_gradient(product, *sum_of_gradients(param), grad, whole, factor)
        else:
            add_gradient(param, product.weight_gradient(grad, whole, factor))
