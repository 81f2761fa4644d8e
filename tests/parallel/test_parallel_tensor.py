"""Tensor-parallel layers and their collectives against the same layers unsplit, in float64."""

import pytest
import torch
import torch.nn.functional as F
from ranks import SIZE, Ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from megalite.config.layout import Layout
from megalite.distributed.collectives import all_gather, reduce_scatter
from megalite.distributed.mesh import Mesh
from megalite.parallel.gradients import sum_together
from megalite.parallel.norm import scaled, split_rms_norm
from megalite.parallel.parameter import parameter, whole
from megalite.parallel.tensor import ColumnLinear, RowLinear, VocabularyEmbedding, columns
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import DOWN_PROJECTION, EMBEDDING, NORM, UP_PROJECTION
from megalite_kernels import rms_norm

SEQUENCE, BATCH, WIDTH, FFN, VOCABULARY = 8, 3, 12, 20, 24
UP, DOWN = Weight((FFN, WIDTH), UP_PROJECTION), Weight((WIDTH, FFN), DOWN_PROJECTION)
TABLE = Weight((VOCABULARY, WIDTH), EMBEDDING)
TP = pytest.mark.parametrize("tp", [1, 2, 4])


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mesh(tp: int) -> Mesh:
    """All ranks, in groups of `tp` neighbours."""
    mesh = Mesh.build(Layout(dp_replicate=SIZE // tp, tp=tp), torch.device("cpu"))
    assert mesh is not None
    return mesh


def _mine(x: Tensor, mesh: Mesh, dim: int = 0) -> Tensor:
    """This rank's part of x, as a leaf."""
    return x.chunk(mesh.tp.size(), dim)[mesh.tp.get_local_rank()].clone().requires_grad_()


def _fill(param: Tensor, values: Tensor, mesh: Mesh, dim: int) -> None:
    with torch.no_grad():
        param.to_local().copy_(_mine(values, mesh, dim))


def _materialize(layer: nn.Module) -> None:
    layer.to(torch.float64).to_empty(device="cpu")


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def _groups(results: list[tuple[Tensor, ...]], tp: int) -> list[list[tuple[Tensor, ...]]]:
    """Results of every tp group, each transposed: one list per returned tensor."""
    return [list(zip(*results[first : first + tp], strict=True)) for first in range(0, SIZE, tp)]


def gather(tp: int) -> tuple[Tensor, Tensor]:
    mesh = _mesh(tp)
    x = _mine(_random(SEQUENCE, WIDTH, BATCH, seed=0).transpose(1, 2), mesh)
    y = all_gather(x, mesh.group("tp"))
    y.backward(_random(SEQUENCE, WIDTH, BATCH, seed=1 + mesh.tp.get_local_rank()).transpose(1, 2))
    return y.detach(), _grad(x)


@TP
def test_all_gather_and_its_gradient(tp: int, ranks: Ranks) -> None:
    """Every rank uses the whole in its own way, so the gradient is the sum of what they ask for."""
    x = _random(SEQUENCE, WIDTH, BATCH, seed=0).transpose(1, 2)
    gradient = sum(_random(SEQUENCE, WIDTH, BATCH, seed=1 + rank).transpose(1, 2) for rank in range(tp))
    for wholes, gradients in _groups(ranks.run(gather, tp), tp):
        for found in wholes:
            assert torch.equal(found, x)
        assert _equal(torch.cat(gradients), gradient)


def scatter(tp: int) -> tuple[Tensor, Tensor]:
    mesh = _mesh(tp)
    x = _random(SEQUENCE, WIDTH, BATCH, seed=1 + mesh.tp.get_local_rank()).transpose(1, 2).requires_grad_()
    y = reduce_scatter(x, mesh.group("tp"))
    y.backward(_mine(_random(SEQUENCE, BATCH, WIDTH, seed=0), mesh).detach())
    return y.detach(), _grad(x)


@TP
def test_reduce_scatter_and_its_gradient(tp: int, ranks: Ranks) -> None:
    total = sum(_random(SEQUENCE, WIDTH, BATCH, seed=1 + rank).transpose(1, 2) for rank in range(tp))
    for parts, gradients in _groups(ranks.run(scatter, tp), tp):
        assert _equal(torch.cat(parts), total)
        for found in gradients:
            assert torch.equal(found, _random(SEQUENCE, BATCH, WIDTH, seed=0))


def column(tp: int) -> tuple[Tensor, ...]:
    mesh = _mesh(tp)
    layer = ColumnLinear(UP, mesh.tp, Weight((FFN,), UP_PROJECTION.bias))
    _materialize(layer)
    _fill(layer.weight, _random(FFN, WIDTH, seed=0), mesh, 0)
    _fill(layer.bias, _random(FFN, seed=1), mesh, 0)
    x = _mine(_random(SEQUENCE, BATCH, WIDTH, seed=2), mesh)
    (y,) = columns(x, [layer], mesh.group("tp"))
    y.backward(_mine(_random(SEQUENCE, BATCH, FFN, seed=3), mesh, -1).detach())
    return y.detach(), _grad(x), _grad(layer.weight).full_tensor(), _grad(layer.bias).full_tensor()


@TP
def test_column_linear(tp: int, ranks: Ranks) -> None:
    weight, bias = _random(FFN, WIDTH, seed=0).requires_grad_(), _random(FFN, seed=1).requires_grad_()
    x = _random(SEQUENCE, BATCH, WIDTH, seed=2).requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(_random(SEQUENCE, BATCH, FFN, seed=3))
    for parts, inputs, weights, biases in _groups(ranks.run(column, tp), tp):
        assert _equal(torch.cat(parts, -1), y)
        assert _equal(torch.cat(inputs), _grad(x))
        for found_weight, found_bias in zip(weights, biases, strict=True):
            assert _equal(found_weight, _grad(weight))
            assert _equal(found_bias, _grad(bias))


def row(tp: int) -> tuple[Tensor, ...]:
    mesh = _mesh(tp)
    layer = RowLinear(DOWN, mesh.tp)
    _materialize(layer)
    _fill(layer.weight, _random(WIDTH, FFN, seed=0), mesh, 1)
    x = _mine(_random(SEQUENCE, BATCH, FFN, seed=1), mesh, -1)
    y = layer(x)
    y.backward(_mine(_random(SEQUENCE, BATCH, WIDTH, seed=2), mesh).detach())
    return y.detach(), _grad(x), _grad(layer.weight).full_tensor()


@TP
def test_row_linear(tp: int, ranks: Ranks) -> None:
    weight, x = _random(WIDTH, FFN, seed=0).requires_grad_(), _random(SEQUENCE, BATCH, FFN, seed=1).requires_grad_()
    y = F.linear(x, weight)
    y.backward(_random(SEQUENCE, BATCH, WIDTH, seed=2))
    for parts, inputs, weights in _groups(ranks.run(row, tp), tp):
        assert _equal(torch.cat(parts), y)
        assert _equal(torch.cat(inputs, -1), _grad(x))
        for found in weights:
            assert _equal(found, _grad(weight))


def block(tp: int) -> tuple[Tensor, ...]:
    """Norm weight on the sequence part, gather, column, row, scatter: how a layer uses them."""
    mesh = _mesh(tp)
    up, down = ColumnLinear(UP, mesh.tp), RowLinear(DOWN, mesh.tp)
    scale = nn.ParameterDict({"weight": parameter(Weight((WIDTH,), NORM), mesh.tp, Replicate())})
    for layer in (up, down, scale):
        _materialize(layer)
    _fill(up.weight, _random(FFN, WIDTH, seed=0), mesh, 0)
    _fill(down.weight, _random(WIDTH, FFN, seed=1), mesh, 1)
    with torch.no_grad():
        scale["weight"].to_local().copy_(_random(WIDTH, seed=2))
    x = _mine(_random(SEQUENCE, BATCH, WIDTH, seed=3), mesh)
    (y,) = columns(x * whole(scale["weight"]), [up], mesh.group("tp"))
    y = down(torch.tanh(y))
    y.backward(_mine(_random(SEQUENCE, BATCH, WIDTH, seed=4), mesh).detach())
    sum_together([_grad(scale["weight"]).to_local()], mesh.group("tp"), torch.device("cpu"))
    weights = (_grad(param).full_tensor() for param in (up.weight, down.weight, scale["weight"]))
    return y.detach(), _grad(x), *weights


@TP
def test_block_between_gather_and_scatter(tp: int, ranks: Ranks) -> None:
    """Each rank makes a part of a replicated weight's gradient, which it sums as a step does."""
    shapes = ((FFN, WIDTH), (WIDTH, FFN), (WIDTH,))
    up, down, scale = (_random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    x = _random(SEQUENCE, BATCH, WIDTH, seed=3).requires_grad_()
    y = F.linear(torch.tanh(F.linear(x * scale, up)), down)
    y.backward(_random(SEQUENCE, BATCH, WIDTH, seed=4))
    for outputs, inputs, *weights in _groups(ranks.run(block, tp), tp):
        assert _equal(torch.cat(outputs), y)
        assert _equal(torch.cat(inputs), _grad(x))
        for found, weight in zip(weights, (up, down, scale), strict=True):
            for each in found:
                assert _equal(each, _grad(weight))


def _tokens() -> Tensor:
    """Some tokens often, some never, and the ends of every rank's part."""
    tokens = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(0))
    tokens[:4, 0] = torch.tensor([0, 5, 6, VOCABULARY - 1])
    tokens[:4, 1] = 11
    return tokens


def embed(tp: int) -> tuple[Tensor, ...]:
    mesh = _mesh(tp)
    layer = VocabularyEmbedding(TABLE, mesh.tp)
    _materialize(layer)
    _fill(layer.weight, _random(VOCABULARY, WIDTH, seed=1), mesh, 0)
    y = layer(_tokens())
    y.backward(_mine(_random(SEQUENCE, BATCH, WIDTH, seed=2), mesh).detach())
    return y.detach(), _grad(layer.weight).full_tensor()


@TP
def test_vocabulary_embedding(tp: int, ranks: Ranks) -> None:
    weight = _random(VOCABULARY, WIDTH, seed=1).requires_grad_()
    y = F.embedding(_tokens(), weight)
    y.backward(_random(SEQUENCE, BATCH, WIDTH, seed=2))
    for parts, weights in _groups(ranks.run(embed, tp), tp):
        assert torch.equal(torch.cat(parts), y)
        for found in weights:
            assert _equal(found, _grad(weight))


def embed_outside() -> str:
    layer = VocabularyEmbedding(TABLE, _mesh(1).tp)
    _materialize(layer)
    try:
        layer(torch.full((SEQUENCE, BATCH), VOCABULARY))
    except IndexError as error:
        return str(error)
    return ""


def test_unsplit_embedding_refuses_tokens_outside_the_vocabulary(ranks: Ranks) -> None:
    assert all("out of range" in said for said in ranks.run(embed_outside))


def split_norm(tp: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    mesh = _mesh(tp)
    values, factors = _random(SEQUENCE, BATCH, WIDTH, seed=0).to(dtype), _random(WIDTH, seed=1).to(dtype)
    x, weight = _mine(values, mesh, -1), _mine(factors, mesh)
    y, inverse = split_rms_norm(x, weight, 0.1, mesh.group("tp"))
    y.backward(_random(SEQUENCE, BATCH, WIDTH, seed=2).to(dtype).chunk(tp, -1)[mesh.tp.get_local_rank()])
    assert torch.equal(scaled(x.detach(), inverse, weight.detach()), y.detach())
    return y.detach(), _grad(x), _grad(weight)


@TP
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-7)])
def test_a_norm_of_features_that_ranks_share_is_that_of_all(
    tp: int, dtype: torch.dtype, tolerance: float, ranks: Ranks
) -> None:
    x = _random(SEQUENCE, BATCH, WIDTH, seed=0).to(dtype).requires_grad_()
    weight = _random(WIDTH, seed=1).to(dtype).requires_grad_()
    y = rms_norm(x, weight, 0.1, backend="torch")
    y.backward(_random(SEQUENCE, BATCH, WIDTH, seed=2).to(dtype))
    for parts in _groups(ranks.run(split_norm, tp, dtype), tp):
        for found, expected in zip(parts, (y.detach(), _grad(x), _grad(weight)), strict=True):
            whole = torch.cat(found, dim=-1)
            assert whole.dtype == dtype
            assert (whole - expected).abs().max() <= tolerance * expected.abs().max()
