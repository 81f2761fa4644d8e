"""Known cluster that a GPU belongs to, by the name that its driver gives it. Imports no torch."""

import re

# Variants of a GPU with other power, memory or links are none of these: their clusters are not known.
DEVICE_PATTERNS = {
    "a100_40gb": r"NVIDIA A100-SXM4-40GB",
    "a100_80gb": r"NVIDIA A100-SXM4-80GB",
    "b200": r"NVIDIA B200",
    "gb200": r"NVIDIA GB200",
    "gb300": r"NVIDIA GB300",
    "h100_nvl": r"NVIDIA H100 NVL",
    "h100_pcie": r"NVIDIA H100 PCIe",
    "h100_sxm": r"NVIDIA H100 80GB HBM3",
    "h200": r"NVIDIA H200",
    "l40s": r"NVIDIA L40S",
    "mi300x": r"AMD Instinct MI300X( OAM)?",
    "rtx4090": r"NVIDIA GeForce RTX 4090",
    "rtx5090": r"NVIDIA GeForce RTX 5090",
}


def cluster_of(device: str) -> str | None:
    """The name of the cluster that has the GPU `device`, as in `NVIDIA H100 80GB HBM3`; None if none is known."""
    return next((name for name, pattern in DEVICE_PATTERNS.items() if re.fullmatch(pattern, device)), None)
