"""How the installed programs end when a signal asks them to."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import stand_in

from megalite_launch.base.processes import HANDLED_SIGNALS

PACKAGE = Path(__file__).parents[2] / "launch"
CHECKED = "printf 'ranks 1\\nlayout one\\nfolder run\\nsteps 0 to 10\\n'; exit 0"


def start(folder: Path, megalite: str, *arguments: str) -> subprocess.Popen[str]:
    """Start megalite-launch on this machine with a stand-in for megalite, which says `begun` when it trains."""
    (folder / "megalite").write_text(f"#!/bin/bash\n{megalite}\n")
    (folder / "megalite").chmod(0o755)
    words = [sys.executable, str(PACKAGE), "launch", "local", "--megalite", str(folder / "megalite"), "config.yaml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*words, *arguments], cwd=folder, start_new_session=True, **pipes)


def last_words(launch: subprocess.Popen[str]) -> str:
    """What it says until its end; where that does not come, nothing of it is left."""
    try:
        return launch.communicate(timeout=30)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launch.pid, signal.SIGKILL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", HANDLED_SIGNALS)
def test_a_stop_while_the_configuration_is_checked_ends_the_check_too(tmp_path: Path, number: signal.Signals) -> None:
    launch = start(tmp_path, "echo $$ >child; touch begun; exec sleep 60")
    wait_for(tmp_path / "begun")
    launch.send_signal(number)
    told = last_words(launch)
    if number == signal.SIGINT:
        assert (launch.returncode, told) == (130, "megalite-launch: interrupted\n")
    else:
        assert (launch.returncode, told) == (3, f"megalite-launch: stopped by {number.name}\n")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while stand_in.alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_the_launcher_has_the_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    python = """
import os, signal, time
signal.signal(int(os.environ["NUMBER"]), lambda *_: (time.sleep(1), open("saved", "x"), os._exit(3)))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {int(os.environ["NUMBER"])})
open("begun", "x")
for _ in range(600):
    time.sleep(0.05)
"""
    (tmp_path / "trains.py").write_text(python)
    words = f'case "$*" in *--check*) {CHECKED};; *--resolved*) echo run:; exit;; esac; '
    words += f"NUMBER={int(number)} exec {sys.executable} trains.py"
    launch = start(tmp_path, words)
    wait_for(tmp_path / "begun")
    launch.send_signal(number)  # to it alone, as kill does
    told = last_words(launch)
    assert launch.returncode == 3, told
    assert (tmp_path / "saved").exists()
