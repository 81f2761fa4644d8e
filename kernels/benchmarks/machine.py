"""Facts of the machine that was measured: the device, and the versions of the software on it."""

import platform
import subprocess
from importlib import metadata

import torch

# The last two bring other kernels behind PyTorch's F.rms_norm.
PACKAGES = ("megalite", "torch", "triton", "liger-kernel", "nvidia-cutlass-dsl", "apache-tvm-ffi")
QUERIED_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory")


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device_facts(device: torch.device) -> dict[str, str]:
    """Return facts of a CUDA device by name, from PyTorch and, where it is installed, nvidia-smi."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory} bytes",
        "cache": f"{properties.L2_cache_size} bytes",
        **nvidia_smi(f"GPU-{properties.uuid}"),
    }


def nvidia_smi(device: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIED_FIELDS)}", "--format=csv,noheader", f"--id={device}"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERIED_FIELDS, output.strip().split(", "), strict=False))


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    packages = {package: version(package) for package in PACKAGES}
    return {"python": platform.python_version(), "CUDA": str(torch.version.cuda), **packages}
