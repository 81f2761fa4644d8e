"""What a run reports: one record per report, with the same names on the console, in metrics.jsonl and TensorBoard."""

import re
from dataclasses import dataclass

import torch

# Dense bf16 peak in FLOP/s, from the makers' data sheets.
PEAK = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}
CONVENTION = "MFU: model FLOPs with causal attention, recompute not counted, over the dense bf16 peak"


@dataclass(frozen=True)
class Throughput:
    """Speed of the whole job over some steps."""

    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None  # None where the peak of the device is not known


def throughput(tokens: int, flops: int, seconds: float, ranks: int, device: torch.device) -> Throughput:
    """Speed of `ranks` devices that trained on `tokens`, with `flops` of the model, in `seconds`."""
    rate, flops_per_device = tokens / seconds, flops / seconds / ranks
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Throughput(rate, flops_per_device / 1e12, None if peak is None else flops_per_device / peak)


def peak_flops(device: str) -> float | None:
    """Peak of a device by its marketing name; the longest name of which it has every word decides."""
    words = set(re.split(r"\W+", device))
    matching = [name for name in PEAK if words.issuperset(name.split())]
    return PEAK[max(matching, key=len)] if matching else None
