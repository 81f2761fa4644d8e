"""What a fork has in common with a process that was started for its program, and programs that are forks."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from warm_program import warm_program
from warm_start import Popen, cold, run

TELLS = """
import os, sys, torch
print(sys.argv[1:], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("HOME"), torch.get_num_threads(), __name__)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("written", ["-c", "-m", "script"])
def test_a_fork_is_like_a_process_of_its_own(written: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    ways = {"-c": ["-c", TELLS], "-m": ["-m", "tells"], "script": ["tells.py"]}
    given = {"PATH": os.environ["PATH"], "GIVEN": "yes", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    fork = run([*ways[written], "a", "b c"], 60, cwd=tmp_path, env=given)
    expected = f"['a', 'b c'] {tmp_path} yes None 1 __main__"
    assert (fork.returncode, fork.stdout.splitlines()[0], fork.stderr) == (7, expected, "\n")


def test_a_fork_ends_of_errors_and_signals_as_a_process_does() -> None:
    failed = run(["-c", "raise ValueError('boom')"], 60)
    assert (failed.returncode, "ValueError: boom" in failed.stderr) == (1, True)
    with Popen(["-c", "input('ready')"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as fork:
        assert fork.stdout is not None
        assert fork.stdout.read(5) == "ready"
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.01)
        fork.send_signal(signal.SIGTERM)
        assert fork.wait(60) == -signal.SIGTERM
    assert fork.poll() == -signal.SIGTERM


def test_a_program_hands_over_streams_signals_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\n"
        "print(sys.argv[1:], sys.stdin.readline(), end='', flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    with (
        warm_program(tmp_path, "waits") as program,
        subprocess.Popen([program, "a b"], env=environment, stdin=pipe, stdout=pipe, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("typed\n")
        process.stdin.flush()
        assert process.stdout.readline() == "['a b'] typed\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 9


def test_a_cold_start_imports_for_itself() -> None:
    done = run(["-c", "import sys; sys.exit('torch' in sys.modules)"], 60, cold)
    assert done.returncode == 0, done.stderr
