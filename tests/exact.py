"""What kernels compute, in float64 from the same inputs, and that results are as near to it as roundings allow.

additions: how many a term goes through at most on its way into a sum over rows, or, of cross-entropy, over classes;
by default as many as there are terms.
"""

from typing import Any

import torch
from rounding import UNITS, assert_rounded
from torch import Tensor

from megalite_kernels.adamw import reference as adamw
from megalite_kernels.backend import USES_INTERPRETER
from megalite_kernels.cross_entropy import reference as cross_entropy
from megalite_kernels.rope import Layout


def _inverse(x: Tensor, eps: float) -> Tensor:
    return ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** -0.5


def assert_norm(y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    wide = x.double()
    exact = wide * _inverse(wide, eps) * weight.double()
    assert y.dtype == x.dtype
    assert_rounded(y, exact, exact.abs(), outer=3, inner=x.shape[-1] + 8)


def assert_norm_gradients(
    dx: Tensor | None, dweight: Tensor | None, x: Tensor, weight: Tensor, eps: float, dy: Tensor,
    dtotal: Tensor | float = 0.0, additions: int | None = None,
) -> None:  # fmt: skip
    """dx has `dtotal` added."""
    assert dx is not None
    assert dweight is not None
    width = x.shape[-1]
    wide, scale, grad = x.double(), weight.double(), dy.double()
    inverse = _inverse(wide, eps)
    direct, along = grad * scale * inverse, grad * scale * wide
    back = wide * inverse**3 / width
    exact = direct - back * along.sum(-1, keepdim=True) + dtotal
    magnitude = direct.abs() + back.abs() * along.abs().sum(-1, keepdim=True) + abs(dtotal)
    assert_rounded(dx, exact, magnitude, outer=6, inner=2 * width + 16)
    terms = (grad * wide * inverse).flatten(0, -2)
    inner = width + (additions or len(terms)) + 8
    assert_rounded(dweight, terms.sum(0), terms.abs().sum(0), outer=4, inner=inner)


def assert_swiglu(
    y: Tensor, dgate: Tensor | None, dup: Tensor | None, gate: Tensor, up: Tensor, dy: Tensor, activation: str = "silu"
) -> None:
    assert dgate is not None
    assert dup is not None
    g, u, grad = gate.double(), up.double(), dy.double()
    z, z_slope = g, torch.ones_like(g)
    if activation == "gelu":
        z, z_slope = 1.5957691216057308 * (g + 0.044715 * g**3), 1.5957691216057308 * (1 + 3 * 0.044715 * g**2)
    sigmoid = 1 / (1 + torch.exp(-z))
    active, inner = g * sigmoid, g * z_slope
    size, magnitude = active.abs(), sigmoid * (1 + inner.abs() * (1 - sigmoid))
    if activation == "gelu":  # PyTorch's is ½ + ½ tanh(z / 2), both rounded to float32, where the logistic function is
        rounded = 4 * UNITS[torch.promote_types(gate.dtype, torch.float32)] / UNITS[gate.dtype]
        size, magnitude = size + rounded * g.abs(), magnitude + rounded * (1 + inner.abs())
    assert y.dtype == gate.dtype
    assert_rounded(y, active * u, size * u.abs(), outer=2, inner=12 + 2 * z.abs())
    assert_rounded(dup, active * grad, size * grad.abs(), outer=2, inner=12 + 2 * z.abs())
    slope = sigmoid * (1 + inner * (1 - sigmoid))
    assert_rounded(dgate, grad * u * slope, (grad * u).abs() * magnitude, outer=2, inner=16 + 8 * z.abs())


def assert_weighted_swiglu(
    y: Tensor, dgate: Tensor | None, dup: Tensor | None, dscores: Tensor | None, gate: Tensor, up: Tensor,
    scores: Tensor, dy: Tensor, rounded: int = 0, clamped: bool = False,
) -> None:  # fmt: skip
    """rounded: how often what is added up for dscores is rounded to the data type of gate, which y may be as well."""
    assert dgate is not None
    assert dup is not None
    assert dscores is not None
    g, u, s, grad = gate.double(), up.double(), scores.double()[:, None], dy.double()
    of_gate, of_up, factor = torch.ones_like(g), torch.ones_like(u), 1.0
    if clamped:
        of_gate, of_up, factor = (g <= 7).double(), (u.abs() <= 7).double(), 1.702
        g, u = g.clamp(max=7), u.clamp(-7, 7) + 1
    bent = factor * g
    sigmoid = 1 / (1 + torch.exp(-bent))
    silu, outer = g * sigmoid, max(rounded, 2) + 3 * clamped
    # Where it is rounded before the exponential, that is a factor of bent for all that comes of it.
    more = 2 * bent.abs() * UNITS[gate.dtype] / UNITS[scores.dtype] if clamped and rounded else 0.0
    assert (y.dtype, dscores.dtype) == (gate.dtype, scores.dtype)
    assert_rounded(y, s * silu * u, (s * silu * u).abs(), outer, inner=13 + 2 * bent.abs() + more)
    assert_rounded(dup, s * silu * grad * of_up, (s * silu * grad).abs(), outer, inner=13 + 2 * bent.abs() + more)
    slope, magnitude = sigmoid * (1 + bent * (1 - sigmoid)), sigmoid * (1 + bent.abs() * (1 - sigmoid))
    inner = 17 + 8 * bent.abs() + 4 * more
    assert_rounded(dgate, s * grad * u * slope * of_gate, (s * grad * u).abs() * magnitude, outer, inner)
    terms = silu * u * grad
    inner = (
        gate.shape[1] + 12 + 2 * bent.abs() + more + (rounded + 3 * clamped) * UNITS[gate.dtype] / UNITS[scores.dtype]
    )
    assert_rounded(dscores, terms.sum(1), (terms.abs() * inner).sum(1), outer=0, inner=1)


def pairs(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if layout == "half" else (x[..., ::2], x[..., 1::2])


def together(first: Tensor, second: Tensor, layout: Layout) -> Tensor:
    return torch.cat((first, second), -1) if layout == "half" else torch.stack((first, second), -1).flatten(-2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Every pair as a complex number, multiplied by its phase."""
    first, second = pairs(x.double(), layout)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
    return together(turned.real, turned.imag, layout)


def sums_of_pairs(x: Tensor, layout: Layout) -> Tensor:
    """In place of both features."""
    first, second = pairs(x, layout)
    return together(first + second, first + second, layout)


def assert_turned(y: Tensor | None, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
    assert y is not None
    assert y.dtype == x.dtype
    assert_rounded(y, turn(x, cos, sin, layout), sums_of_pairs(x.double().abs(), layout), outer=3, inner=4)


def assert_norm_turned(
    y: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, layout: Layout
) -> None:
    wide = x.double()
    normal = wide * _inverse(wide, eps) * weight.double()
    assert y.dtype == x.dtype
    exact, magnitude = turn(normal, cos, sin, layout), sums_of_pairs(normal.abs(), layout)
    assert_rounded(y, exact, magnitude, outer=4, inner=x.shape[-1] + 12)


def assert_norm_turned_gradients(
    dx: Tensor | None, dweight: Tensor | None, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    layout: Layout, dy: Tensor, additions: int | None = None,
) -> None:  # fmt: skip
    assert dx is not None
    assert dweight is not None
    width = x.shape[-1]
    wide, scale = x.double(), weight.double()
    inverse = _inverse(wide, eps)
    normal = wide * inverse
    back, size = turn(dy, cos, -sin, layout), sums_of_pairs(dy.double().abs(), layout)
    along = (back * scale * normal).mean(-1, keepdim=True)
    most = (size * (scale * normal).abs()).mean(-1, keepdim=True)
    exact = inverse * (back * scale - normal * along)
    magnitude = inverse * (size * scale.abs() + normal.abs() * most)
    assert_rounded(dx, exact, magnitude, outer=6, inner=2 * width + 20)
    terms, sizes = ((value * normal).flatten(0, -2) for value in (back, size))
    inner = width + (additions or len(terms)) + 12
    assert_rounded(dweight, terms.sum(0), sizes.abs().sum(0), outer=4, inner=inner)


def assert_logits_gradient(
    dx: Tensor | None, logits: Tensor, targets: Tensor, scale: float, additions: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """dx is the gradient of scale · cross-entropy. Returns the loss, and the sum of the sizes of what it is made of."""
    assert dx is not None
    classes = logits.shape[1]
    exact = logits.detach().double().clone().requires_grad_()
    loss = cross_entropy(exact, targets, **options)
    (gradient,) = torch.autograd.grad(loss * scale, exact)
    wide, cap = exact.detach(), options.get("softcap")
    wide = wide if cap is None else cap * (wide / cap).tanh()
    lse = wide.logsumexp(1)
    terms = (lse.abs() + wide.abs().amax(1) + 1) * (1 + 2 * options.get("z_loss", 0) * lse.abs())
    # An error of the exponent is an error relative to the exponential; what it is compared with is at most 1.
    magnitude = ((wide - lse[:, None]).exp() + 1 / classes) * terms[:, None] * scale
    magnitude += torch.nn.functional.one_hot(targets.clamp(0), classes) * scale
    outer = 2 if USES_INTERPRETER else 1  # Triton's interpreter does not round to bfloat16, it cuts off
    assert_rounded(dx, gradient, magnitude, outer, inner=(additions or classes) + 16)
    return loss.detach(), terms.sum()


def assert_updated(
    new: tuple[Tensor, Tensor, Tensor], weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int,
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip: float = 1.0,
) -> None:  # fmt: skip
    """new: weight and moments after AdamW's update number `step` of the others."""
    w, m, v = adamw(weight, grad.double(), first, second, step, lr, betas, eps, weight_decay, clip)
    moved = betas[0] * first.double().abs() + (1 - betas[0]) * clip * grad.double().abs()
    assert_rounded(new[1], m, moved, outer=2, inner=4)
    assert_rounded(new[2], v, v, outer=2, inner=8)
    rate = lr / (1 - betas[0] ** step) * (1 - betas[1] ** step) ** 0.5
    magnitude = weight.double().abs() + rate * moved / (v.sqrt() + eps)
    assert_rounded(new[0], w, magnitude, outer=1 if weight.dtype != torch.bfloat16 else 2, inner=16)
