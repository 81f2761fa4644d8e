"""Initial values are a pure function of (seed, name, global index), on every device and in every layout."""

import hashlib
import math
import struct
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Train
from megalite.distributed.mesh import Mesh
from megalite.model import init
from megalite.model.decoder import Decoder
from megalite.model.init import fill_normal, initialize, standard_deviation
from megalite.parallel.parameter import parameter
from megalite.plan.parts import roles
from megalite.plan.parts.part import Weight
from megalite.plan.resolved import resolve
from megalite.train.build import build_stage

NAME = "layers.0.attention.q.weight"
MODEL = Model(layers=2, width=24, heads=4, kv_heads=2, ffn=40, vocab_size=36, qk_norm=True, qkv_bias=True)


def _whole(rows: int, columns: int, std: float = 0.02, key: str = f"0/{NAME}") -> Tensor:
    return _box((rows, columns), (slice(0, rows), slice(0, columns)), std, key)


def _box(shape: tuple[int, int], box: tuple[slice, slice], std: float = 0.02, key: str = f"0/{NAME}") -> Tensor:
    local = torch.full([side.stop - side.start for side in box], math.nan, dtype=torch.float64)
    fill_normal(local, shape, (box[0].start, box[1].start), std, key)
    return local


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[slice, slice]]:
    shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    sides = []
    for size in shape:
        start = draw(st.integers(0, size))
        sides.append(slice(start, draw(st.integers(start, size))))
    return shape, (sides[0], sides[1])


@given(_boxes(), st.integers(1, 200))
def test_any_box_is_a_part_of_the_whole(case: tuple[tuple[int, int], tuple[slice, slice]], block: int) -> None:
    shape, box = case
    expected = _whole(*shape)[box]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK", block)
        assert torch.equal(_box(shape, box), expected)


def test_a_box_of_a_stack_is_a_part_of_one_matrix_of_all_rows() -> None:
    local = torch.full((2, 1, 3, 4), math.nan, dtype=torch.float64)
    fill_normal(local, (3, 2, 5, 7), (1, 1, 2, 3), 0.02, f"0/{NAME}")
    assert torch.equal(local, _whole(3 * 2 * 5, 7).view(3, 2, 5, 7)[1:, 1:, 2:, 3:])


def test_golden_values() -> None:
    """The function must never change: old runs could not be repeated."""
    golden = [
        ["-0x1.52e496p-7", "0x1.0b71b6p-7", "0x1.57eddcp-11", "-0x1.20d488p-8"],
        ["-0x1.46df24p-6", "-0x1.5110e2p-6", "-0x1.3a8234p-8", "-0x1.da1c28p-7"],
    ]
    assert _whole(2, 4).tolist() == [[float.fromhex(value) for value in row] for row in golden]


@given(st.integers(0, 2**40), st.text(max_size=20), st.sampled_from([1.0, 0.02, 0.02 / math.sqrt(24)]))
def test_values_equal_scalar_arithmetic(position: int, key: str, std: float) -> None:
    """IEEE double arithmetic, one rounding per operation, gives the same bits: nothing is fused or approximated."""
    row, column = divmod(position, 1000)
    found = _box((row + 1, 1000), (slice(row, row + 1), slice(column, column + 1)), std, key)
    assert found.item() == _scalar(position, key, std)


def _scalar(position: int, key: str, std: float) -> float:
    word = (1 << 64) - 1
    z = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    z = (z + (position + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    bucket, point = z >> 48, (z >> 16 & 0xFFFFFFFF) / 2**32
    low, high = (_quantile(edge) for edge in (bucket, bucket + 1))
    return struct.unpack("f", struct.pack("f", (low + (high - low) * point) * std))[0]


def _quantile(edge: int) -> float:
    if edge in (0, 1 << 16):
        return math.copysign(NormalDist().inv_cdf(0.25 / (1 << 16)), edge - 1)
    return NormalDist().inv_cdf(edge / (1 << 16))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen.add((function.overloadpacket.__name__, result.dtype))
        return result


def test_only_operations_that_every_device_rounds_alike() -> None:
    """Integers wrap alike everywhere; of the floating-point operations, IEEE 754 fixes every bit of these."""
    init._quantiles()
    with Operations() as operations:
        _whole(3, 5)
    floating = {name for name, dtype in operations.seen if dtype.is_floating_point}
    moves = {"full", "_to_copy", "index", "slice", "copy_"}
    assert floating <= moves | {"add", "sub", "mul"}
    integer = {name.strip("_") for name, dtype in operations.seen if not dtype.is_floating_point}
    shifts = {"rshift", "and", "xor", "bitwise_xor", "bitwise_and", "bitwise_right_shift"}
    assert integer <= shifts | {"arange", "add", "mul", "unsqueeze", "slice"}


def test_other_names_and_seeds_give_other_values() -> None:
    keys = [f"{seed}/{name}" for seed in (0, 1) for name in (NAME, NAME.replace("q", "k"), NAME.replace("0", "1"))]
    matrices = [_whole(50, 40, key=key) for key in keys]
    for index, matrix in enumerate(matrices):
        for other in matrices[:index]:
            # Two independent values of 24 random bits agree about once in 2^20.
            assert (matrix == other).double().mean() < 0.01


def test_values_are_exact_in_float32() -> None:
    values = _whole(64, 64)
    assert torch.equal(values, values.float().double())
    narrow = torch.empty(64, 64, dtype=torch.bfloat16)
    fill_normal(narrow, (64, 64), (0, 0), 0.02, f"0/{NAME}")
    assert torch.equal(narrow, values.bfloat16())


def test_moments_are_those_of_the_normal_distribution() -> None:
    """Within 6 standard errors of n independent draws, plus what cutting the tails takes away."""
    n, std = 1 << 20, 0.02
    x = _whole(1 << 10, 1 << 10, std).flatten() / std
    cut = 1e-3  # short tails make the fourth moment 7e-4 smaller, the second less
    assert abs(x.mean()) < 6 / math.sqrt(n)
    assert abs(x.var() - 1) < 6 * math.sqrt(2 / n) + cut
    assert abs((x**3).mean()) < 6 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 6 * math.sqrt(96 / n) + cut
    assert x.abs().max() < 4.5


def test_values_follow_the_normal_distribution() -> None:
    """Kolmogorov's distance: by the inequality of Dvoretzky, Kiefer and Wolfowitz above this once in 10^9."""
    n = 1 << 18
    x = _whole(1 << 9, 1 << 9, 1.0).flatten().sort().values
    expected = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    observed = torch.arange(n, dtype=torch.float64) / n
    bound = math.sqrt(math.log(2 / 1e-9) / (2 * n)) + 1 / n
    assert (observed - expected).abs().max() < bound


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (16, 0)])
def test_neighbours_are_uncorrelated(shift: tuple[int, int]) -> None:
    down, across = shift
    x = _whole(512, 512, 1.0)
    products = x[down:, across:] * x[: 512 - down, : 512 - across]
    assert abs(products.mean()) < 6 / math.sqrt(products.numel())


@pytest.mark.parametrize(("shape", "offset"), [((0, 7), (5, 0)), ((5, 0), (0, 7))])
def test_empty_part(shape: tuple[int, int], offset: tuple[int, int]) -> None:
    part = torch.empty(shape)
    fill_normal(part, (5, 7), offset, 0.02, NAME)
    assert part.shape == shape


def test_standard_deviation_of_residual_projections() -> None:
    model = replace(MODEL, layers=8, init_std=0.03)
    for role in (roles.ATTENTION_OUTPUT, roles.DOWN_PROJECTION):
        assert standard_deviation(model, role) == pytest.approx(0.03 / 4)
    for role in (roles.QUERY, roles.UP_PROJECTION, roles.EMBEDDING, roles.HEAD):
        assert standard_deviation(model, role) == 0.03


def test_initialize_fills_every_parameter(alone: Mesh) -> None:
    decoder = Decoder(MODEL, alone.tp, range(2)).to_empty(device="cpu")
    initialize(decoder, MODEL, seed=3)
    for name, param in decoder.named_parameters():
        assert torch.equal(param.to_local(), _expected(name, param.shape, 3)), name


class Experts(nn.Module):
    """Feed-forwards of some experts, as stacks of their matrices."""

    def __init__(self, mesh: Mesh, experts: int) -> None:
        super().__init__()
        shapes = {"up": (experts, MODEL.ffn, MODEL.width), "down": (experts, MODEL.width, MODEL.ffn)}
        self.roles = {"up": roles.UP_PROJECTION, "down": roles.DOWN_PROJECTION}
        for name, shape in shapes.items():
            weight = Weight(shape, self.roles[name])
            setattr(self, name, parameter(weight, mesh.tp, Shard(weight.split)))
            assert weight.part(2) == tuple(size // (1 + (dim == weight.split)) for dim, size in enumerate(shape))


def test_matrices_of_a_stack_start_as_any_matrix_of_their_role(alone: Mesh) -> None:
    experts = Experts(alone, 3).to_empty(device="cpu")
    initialize(experts, MODEL, seed=3)
    for name, param in experts.named_parameters():
        rows, columns = param.shape[0] * param.shape[1], param.shape[2]
        std = standard_deviation(MODEL, experts.roles[name])
        assert torch.equal(param.to_local().flatten(0, 1), _whole(rows, columns, std, f"3/{name}").float()), name
    assert experts.up.to_local()[0].std() > experts.down.to_local()[0].std() * 1.5


def _expected(name: str, shape: torch.Size, seed: int) -> Tensor:
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
    std = MODEL.init_std / math.sqrt(2 * MODEL.layers) if residual else MODEL.init_std
    return _whole(*shape, std, f"{seed}/{name}").float()


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"pp": 2, "tp": 2, "dp_shard": 2}, {"dp_shard": 5}])
def test_every_layout_starts_from_the_same_weights(axes: dict[str, int], ranks: Ranks) -> None:
    model, parallel = replace(MODEL, sequence_length=8), replace(Parallel(), **({"dp_shard": 1} | axes))
    config = Config(model=model, parallel=parallel, batch=Batch(global_=40), train=Train(precision="fp32"))
    names = set().union(*ranks.run(mismatches, config))
    assert names == set()


def mismatches(config: Config) -> set[str]:
    """Names of this rank's parameters that, put together from all ranks, are not what they should be."""
    mesh = Mesh.build(config.parallel.layout, torch.device("cpu"))
    if mesh is None:
        return set()
    stage = build_stage(resolve(config), mesh, mesh.coordinates["pp"])
    wholes = {name: param.full_tensor() for name, param in stage.named_parameters()}
    return {name for name, found in wholes.items() if not torch.equal(found, _expected(name, found.shape, 0))}
