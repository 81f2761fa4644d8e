"""Speed and model FLOPs utilization, worked out by hand."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from toy_jobs import MODEL, config_of, make, one_rank

from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.data.order import mixture, mixture_counts
from megalite.plan.batches import GlobalBatch
from megalite.train.guard import Judged
from megalite.train.metrics import Meter, peak_flops, source_tokens, throughput
from megalite.train.vital_signs import Reading


def test_speed_is_of_the_job_and_flops_are_of_a_device() -> None:
    speed = throughput(tokens=6000, flops=9 * 10**12, seconds=3.0, ranks=4, device=torch.device("cpu"))
    assert speed.tokens_per_second == 2000
    assert speed.tflops_per_device == 0.75
    assert speed.mfu is None


def test_utilization_is_a_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    flops = 4 * 989 * 10**12  # what 4 devices at their peak do in a second
    speed = throughput(1000, flops, seconds=2.0, ranks=4, device=torch.device("cuda", 0))
    assert speed.mfu == pytest.approx(0.5)
    assert speed.tflops_per_device == pytest.approx(989 / 2)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_peaks_of_data_sheets(device: str, peak: float) -> None:
    assert peak_flops(device) == peak


@pytest.mark.parametrize(
    "device", ["", "cpu", "Tesla T4", "NVIDIA GeForce RTX 4090", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"]
)
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert peak_flops(device) is None


@pytest.mark.parametrize("left_out", [(), ((3, 8),), ((0, 5), (15, 40))])
def test_tokens_of_a_source_are_those_of_its_samples(left_out: tuple[tuple[int, int], ...]) -> None:
    weights, read = (3, 1), 20
    parts = [SimpleNamespace(path="a"), SimpleNamespace(path="b")]
    samples = SimpleNamespace(parts=parts, counts=lambda n: mixture_counts(n, weights), sequence_length=8)
    taken = [index for index in range(read) if not any(first <= index < end for first, end in left_out)]
    expected = Counter(mixture(index, weights)[0] for index in taken)
    found = source_tokens(samples, Progress(samples=read, left_out=left_out))  # type: ignore[arg-type]
    assert found == {"tokens/a": 8 * expected[0], "tokens/b": 8 * expected[1]}


def test_the_first_of_several_high_gradient_norms_is_a_jump() -> None:
    with one_rank():
        meter = Meter(make(config_of(Layout(), MODEL)))
    told = []
    for step, norm in enumerate([1.0, 1.1, 0.9] * 20 + [2.0, 22.0, 21.0, 1.0, 22.0], start=1):
        judged = Judged(step, GlobalBatch(0, 8), Reading(1.0, norm, ()), "good", "")
        if meter.jumps(judged):
            told.append(step)
        meter.add(judged)
    assert told == [62, 65]


def test_the_wait_for_data_is_that_of_a_step() -> None:
    def slow() -> object:
        for item in range(2):
            time.sleep(0.02)
            yield item

    with one_rank():
        meter = Meter(make(config_of(Layout(), MODEL)))
        assert list(meter.waits(slow())) == [0, 1]  # type: ignore[arg-type, type-var]
        for step in (1, 2):
            meter.add(Judged(step, GlobalBatch(0, 8), Reading(1.0, 1.0, ()), "good", ""))
        meter.note(2)
        record = meter.read(2)
    assert record["data_wait_seconds"] >= 0.02
    assert record["step_seconds"] >= record["data_wait_seconds"]
    assert record["peak_memory_bytes"] > 1e6
