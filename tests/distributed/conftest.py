"""Programs to launch as ranks."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

RANK = """\
import os, signal, sys, time
from pathlib import Path

rank, world_size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module `program` to launch, which finds `rank`, `world_size` and `folder`; and a folder for logs."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(RANK + dedent(text))
        return "program"

    return write
