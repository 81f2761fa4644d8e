"""The kernels stand on torch alone."""

import subprocess
import sys


def test_kernels_import_nothing_of_megalite() -> None:
    program = "import sys, megalite_kernels; print(*(name for name in sys.modules if name.startswith('megalite')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages == {"megalite_kernels"}
