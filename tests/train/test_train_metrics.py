"""Speed and model FLOPs utilization, worked out by hand."""

import pytest
import torch

from megalite.config.schema import Model
from megalite.train.metrics import peak_flops, throughput

# Per token: 6 for each of 2·(4·16² + 3·16·32) + 8·16 weights of matrices, and 6·2·16·10 for attention.
MODEL = Model(layers=2, width=16, heads=2, kv_heads=2, ffn=32, vocab_size=8, sequence_length=10)
FLOPS_PER_TOKEN = 6 * (2 * (4 * 256 + 3 * 512) + 128) + 6 * 2 * 16 * 10


def test_speed_is_of_the_job_and_flops_are_of_a_device() -> None:
    speed = throughput(MODEL, tokens=6000, seconds=3.0, ranks=4, device=torch.device("cpu"))
    assert speed.tokens_per_second == 2000
    assert speed.tflops_per_device == pytest.approx(2000 * FLOPS_PER_TOKEN / 4 / 1e12)
    assert speed.mfu is None


def test_utilization_is_a_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    tokens = round(4 * 989e12 / FLOPS_PER_TOKEN)  # what 4 devices at their peak do in a second
    speed = throughput(MODEL, tokens, seconds=2.0, ranks=4, device=torch.device("cuda", 0))
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
