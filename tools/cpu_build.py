"""Prints, as constraints of pip, the newest build of PyTorch for CPUs alone that pip finds, and the Triton made for it.

Prints nothing where a GPU is there or no such build is at hand. The builds of PyPI bring CUDA: 3 GB that a machine
without a GPU has no use for. `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` puts the small ones at hand.
Needs nothing but pip.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows' Linux
TRITONS = {
    11: "3.6",
    12: "3.7",
    13: "3.7",
    14: "3.8",
    15: "3.9",
}  # by minor version of PyTorch 2: what its CUDA builds require


def allowed(project: str) -> range:
    """The minor versions of PyTorch 2 that pyproject.toml, whose text is `project`, allows."""
    requirements = tomllib.loads(project)["project"]["dependencies"]
    (bounds,) = (found for text in requirements if (found := re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", text)))
    return range(int(bounds[1]), int(bounds[2]))


def constraints(versions: str, minors: range) -> list[str]:
    """The lines for what `pip index versions torch` has printed, newest first."""
    for found in re.finditer(r"\b2\.(\d+)\.\d+\+cpu(?=,|\s|\)|$)", versions):
        if int(found[1]) in minors:
            return [f"torch=={found[0]}", f"triton=={TRITONS[int(found[1])]}.*"]
    return []


def main() -> None:
    if any(Path(device).exists() for device in GPUS):
        return
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # without an index pip speaks later
    project = Path(__file__).parents[1] / "pyproject.toml"
    for line in constraints(found.stdout, allowed(project.read_text())):
        print(line)


if __name__ == "__main__":
    main()
