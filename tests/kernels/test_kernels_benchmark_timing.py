"""The benchmark of the kernels: its inputs, how it compares, how calls take turns."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu
from rounding import DEVICE, random

from megalite_kernels.benchmarks import timing
from megalite_kernels.benchmarks.agreement import excess
from megalite_kernels.benchmarks.cases import OPS, WHOLE_PASS, cases
from megalite_kernels.benchmarks.inputs import MODELS, TINY_MODEL, fitting
from megalite_kernels.benchmarks.timing import (
    Call,
    Gpu,
    Spread,
    Warm,
    copied_sizes,
    copies,
    copy_bandwidths,
    rounds_for,
    spread,
    take_turns,
    warm_up,
)


def test_excess() -> None:
    exact = random(64, 64, dtype=torch.float32, seed=0)
    rounded = torch.bfloat16, 1
    assert excess(exact, exact, rounded) == 0
    assert 0.2 < excess(exact.bfloat16(), exact, rounded) <= 1
    assert excess(exact * 1.01, exact, rounded) == pytest.approx(0.01 * 256, rel=1e-3)
    assert excess(exact[:-1], exact, rounded) == math.inf
    exact[3, 3] = 1
    for wrong in (1.2, math.nan, math.inf):
        found = exact.clone()
        found[3, 3] = wrong
        assert excess(found, exact, rounded) > 4


def test_parameters_are_those_of_the_models() -> None:
    """Published counts: 8,030,261,248 and, with all 80 layers, 70,553,706,496."""
    assert len(MODELS["8B"].parameters()) == 291
    assert MODELS["8B"].elements * 8 == 8_030_261_248
    assert replace(MODELS["70B"], layers=80).elements * 16 == 70_553_706_496
    for model in MODELS.values():
        assert 0.9e9 < model.elements < 1.1e9
        half = fitting(model, 40 << 30)
        assert (half.ranks, fitting(model, 70 << 30)) == (2 * model.ranks, model)


def test_bytes_of_the_published_floors() -> None:
    """Of Llama 3 8B, 8192 tokens in bfloat16, in MB."""
    moved = {case.op: case.moved for case in cases(OPS, [MODELS["8B"]])}
    assert {op: round(moved[op]["forward"] / 1e6) for op in ("rms_norm", "rope", "swiglu", "cross_entropy")} == {
        "rms_norm": 134,
        "rope": 168,
        "swiglu": 705,
        "cross_entropy": 2101,
    }
    assert moved["cross_entropy"][WHOLE_PASS] == 6 * 8192 * 128256
    assert moved["adamw"][WHOLE_PASS] == 28 * MODELS["8B"].elements
    assert moved["linear_cross_entropy"] == {}


def test_inputs_are_the_same_every_time_and_can_be_restored() -> None:
    for case in cases(OPS, [TINY_MODEL]):
        one, other = case.make(DEVICE), case.make(DEVICE)
        with torch.no_grad():
            for tensor in one._tensors():
                tensor.zero_()
        one.restore()
        assert all(torch.equal(a, b) for a, b in zip(one._tensors(), other._tensors(), strict=True))
        assert not any(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in one._tensors())


def _takes(gpu: FakeGpu, seconds: float) -> Callable[[object], None]:
    def run(_: object) -> None:
        gpu.time += seconds

    return run


def test_turns() -> None:
    """Only `run` counts; the order changes from round to round; every call has its lead before it."""
    gpu, order = FakeGpu(), []

    def call(name: str, seconds: float) -> Call:
        def prepare() -> str:
            gpu.time += 1000
            order.append(name)
            return name

        def run(given: str) -> None:
            assert given == name
            gpu.time += seconds * (1 + len(order) // 4)

        return Call(run, prepare)

    found = take_turns({"a": (call("a", 2.0), 0.1), "b": (call("b", 3.0), 0.2)}, gpu, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert gpu.leads == [0.1, 0.2, 0.2, 0.1, 0.1, 0.2]
    assert {name: [round(each, 6) for each in seconds] for name, seconds in found.items()} == {
        "a": [2, 4, 4],
        "b": [3, 3, 6],
    }


def test_warm_up() -> None:
    gpu, calls = FakeGpu(ticks=0.5), []
    found = warm_up(Call(calls.append, lambda: "given"), gpu)
    assert found == Warm(host=0.5, peak=4000, turn=1.5)
    assert set(calls) == {"given"}
    assert found.lead == 0.02
    assert replace(found, host=0.001).lead == 0.002


def test_rounds() -> None:
    warm = [Warm(host=0.0, peak=0, turn=0.05)] * 2
    assert (rounds_for(warm, 50), rounds_for(warm, 100), rounds_for(warm * 100, 50)) == (50, 60, 10)
    assert rounds_for(warm * 100, 3) == 3


def test_spread() -> None:
    assert spread([float(number) for number in range(101)][::-1]) == Spread(10, 50, 90, 101)


def test_bandwidth_of_copies() -> None:
    gpu = FakeGpu()
    calls = {"slow": (6, Call(_takes(gpu, 2.0))), "fast": (8, Call(_takes(gpu, 1.0)))}
    assert copy_bandwidths(gpu, calls, 4) == pytest.approx({"slow": 3.0, "fast": 8.0})
    assert copied_sizes(80 << 30) == [1 << 30, 1 << 31, 1 << 32]
    assert copied_sizes(1000) == [124]
    for moved, call in copies(DEVICE, [64]).values():
        assert moved == 128
        assert call.run(None).nbytes == 64


def test_the_device_is_kept_busy_by_writing_over_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with all of CUDA that is used in its place."""
    fake = FakeGpu(ticks=0.001)
    cuda = {"get_device_properties": lambda _: SimpleNamespace(L2_cache_size=100), "Event": lambda **_: fake.event()}
    cuda |= {"synchronize": lambda _: None, "empty_cache": lambda: None, "mem_get_info": lambda _: (7, 8)}
    cuda |= {
        "memory_allocated": lambda _: 5,
        "max_memory_allocated": lambda _: 6,
        "reset_peak_memory_stats": lambda _: None,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(timing, "FLUSHED_BYTES", 64)
    gpu = Gpu(torch.device("cpu"))
    assert gpu._scratch.nbytes == 400
    writes: list[None] = []
    gpu._scratch = SimpleNamespace(zero_=lambda: writes.append(None))
    for seconds, times in ((0.0, 1), (0.001, 2), (0.0101, 12)):
        writes.clear()
        gpu.keep_busy(seconds)
        assert len(writes) == times
    assert (gpu.free(), gpu.allocated(), gpu.peak()) == (7, 5, 6)
    assert warm_up(Call(lambda _: None), gpu).peak == 1
