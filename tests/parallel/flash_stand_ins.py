"""Stand-ins, on any device, for the operations that call FlashAttention on CUDA."""

from types import SimpleNamespace

import torch
from torch import Tensor


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    """What `aten::_flash_attention_forward` is documented to do on CUDA: dense `[b, n, h, e]` or packed `[n, h, e]`."""
    assert (dropout, debug) == (0.0, False)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert window_size_right == (0 if causal and window_size_left >= 0 else -1)
    if offsets_q is None or offsets_k is None:
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        return *plain_attention(q, k, v, causal, window_size_left, scale), Tensor(), Tensor(), Tensor()
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    found = []
    lengths = offsets_q.diff().tolist(), offsets_k.diff().tolist()
    assert (longest_q, longest_k) == (max(lengths[0]), max(lengths[1]))
    for parts in zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True):
        found.append(plain_attention(*(part[None] for part in parts), causal, window_size_left, scale))
    out = torch.cat([out[0] for out, _ in found])
    return out, torch.cat([lse[0] for _, lse in found], dim=1), Tensor(), Tensor(), Tensor()


def plain_scores(q: Tensor, k: Tensor, causal: bool, left: int, scale: float | None) -> Tensor:
    """`[b, h, n, m]`. The last query is at the place of the last key; a query sees `left` keys before its place."""
    n, m = q.shape[1], k.shape[1]
    scores = torch.einsum("bnhe,bmhe->bhnm", q, per_query_head(k, q)) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    back = torch.arange(n)[:, None] + m - n - torch.arange(m)
    hidden = (back < 0 if causal else torch.zeros(n, m, dtype=torch.bool)) | (back > (m if left < 0 else left))
    return scores.masked_fill(hidden, -torch.inf)


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = plain_scores(q, k, causal, left, scale)
    return torch.einsum("bhnm,bmhe->bnhe", scores.softmax(-1), per_query_head(v, q)), scores.logsumexp(-1)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    causal: bool,
    *_: object,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    """Likewise `aten::_flash_attention_backward`; `out` and `lse` may be those of more keys than k has."""
    how = causal, window_size_left, scale
    assert dropout == 0.0
    if offsets_q is None or offsets_k is None:
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        return plain_backward(grad, q, k, v, out, lse, *how)
    lengths = offsets_q.diff().tolist(), offsets_k.diff().tolist()
    assert (longest_q, longest_k) == (max(lengths[0]), max(lengths[1]))
    cut = [x.split(lengths[0]) for x in (grad, q)], [x.split(lengths[1]) for x in (k, v)], out.split(lengths[0])
    parts = zip(*cut[0], *cut[1], cut[2], lse.split(lengths[0], dim=1), strict=True)
    found = [plain_backward(*(x[None] for x in part), *how) for part in parts]
    return tuple(torch.cat([x[0] for x in grads]) for grads in zip(*found, strict=True))


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    left: int,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """The formulas of Dao et al. 2022, arXiv 2205.14135, appendix B.2."""
    weights = (plain_scores(q, k, causal, left, scale) - lse[..., None]).exp()
    dweights = torch.einsum("bnhe,bmhe->bhnm", grad, per_query_head(v, q))
    dscores = weights * (dweights - (grad * out).sum(-1).transpose(1, 2)[..., None])
    dscores *= q.shape[-1] ** -0.5 if scale is None else scale
    dk, dv = torch.einsum("bhnm,bnhe->bmhe", dscores, q), torch.einsum("bhnm,bnhe->bmhe", weights, grad)
    shared = [x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv)]
    return torch.einsum("bhnm,bmhe->bnhe", dscores, per_query_head(k, q)), *shared


STAND_INS = SimpleNamespace(_flash_attention_forward=flash_forward, _flash_attention_backward=flash_backward)
