"""Speed and model FLOPs utilization, worked out by hand."""

import pytest
import torch

from megalite.train.metrics import peak_flops, throughput


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
