"""megalite-node: the ranks of one of several machines."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite_launch.base.events import read_events
from megalite_launch.base.outcome import read_outcome
from megalite_launch.base.run_folder import Attempt, RunFolder
from megalite_launch.commands import run

ROOT = Path(__file__).parents[2]
SAYS = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""
LISTENS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
signal.pthread_sigmask(signal.SIG_UNBLOCK, list(signal.valid_signals()))
time.sleep(60)
"""
LATE = """
import os, signal, sys, time
if os.environ["LOCAL_RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
sys.exit(4)
"""


def start(*command: str, ranks: int = 2, nodes: int = 1, node: int = 0, **extra: object) -> subprocess.Popen[str]:
    options = ["--nodes", str(nodes), "--node-rank", str(node), "--ranks", str(ranks), "--master", "localhost"]
    words = [sys.executable, str(ROOT / "launch"), "node", *options, "--", *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **extra)  # type: ignore[call-overload, no-any-return]


def test_every_rank_knows_its_place() -> None:
    done = start(sys.executable, "-c", SAYS, ranks=2, nodes=3, node=1)
    out, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert sorted(out.splitlines()) == ["2 6 0 2 localhost", "3 6 1 2 localhost"]


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler of a signal (Linux)."""
    told = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    return bool(int(told["SigCgt"], 16) >> (number - 1) & 1)


def test_a_signal_waits_until_a_rank_can_hear_it() -> None:
    process = start(sys.executable, "-c", LISTENS, ranks=2)
    deadline = time.monotonic() + 30
    while not _catches(process.pid, signal.SIGUSR2):  # the ranks are not up by then
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=60)
    assert process.returncode == 3


def test_a_failed_rank_ends_the_others_and_its_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite_launch.supervise.node.GRACE", 0.5)
    began = time.monotonic()
    options = ["--nodes", "1", "--node-rank", "0", "--ranks", "2", "--master", "localhost"]
    assert run("node", [*options, "--", sys.executable, "-c", LATE]) == 4
    assert time.monotonic() - began < 30


def test_ranks_die_with_their_node() -> None:
    process = start(sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)", ranks=1)
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{rank}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{rank}").exists()
    process.communicate()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((5, 1), 1), ((5,), 5), ((-9, 5), 137), ((2,), 2), ((), 0)],
)
def test_a_rank_that_lost_contact_is_not_the_cause(codes: tuple[int, ...], expected: int) -> None:
    from megalite_launch.supervise.node import _code  # noqa: PLC0415

    assert _code(codes) == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nodes", "2", "--node-rank", "2", "--ranks", "1", "--master", "a"], "below --nodes 2"),
        (["--nodes", "0", "--node-rank", "0", "--ranks", "1", "--master", "a"], "whole number from 1"),
        (["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "a b"], "name or address"),
        (
            ["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "a", "--port", "0"],
            "from 1 to 65,535",
        ),
        (["--nodes", "1", "--node-rank", "0", "--ranks", "1", "--master", "a"], "no-such-program: cannot be started"),
    ],
)
def test_bad_input(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = run("node", [*options, "--", "no-such-program"])
    except SystemExit as ended:  # argparse's
        code = int(str(ended.code))
    assert code == 2
    assert told in capsys.readouterr().err


def test_two_machines_train_as_one_does(work: SimpleNamespace, expected: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = ["megalite", "train", "config.yaml", "run.name=machines"]
    machines = []
    for node in range(2):
        options = ["--nodes", "2", "--node-rank", str(node), "--ranks", "2", "--master", "localhost", "--port", port]
        options += ["--run", "runs/machines", "--job", "uid"]
        words = [sys.executable, str(ROOT / "launch"), "node", *options, "--", *command]
        environment = {**os.environ, **work.environment, "MEGALITE_NODE": f"m{node}"}
        machines.append(subprocess.Popen(words, cwd=work.folder, env=environment, stderr=subprocess.PIPE, text=True))
    told = [machine.communicate(timeout=120)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert work.losses("machines") == expected
    run = RunFolder(work.folder / "runs/machines")
    assert [event["event"] for event in read_events(run.events)] == ["begin", "attempt", "attempt_ended", "end"]
    attempt = Attempt("uid", 0, 0)
    outcome = read_outcome(run.attempt(attempt))
    assert outcome is not None
    assert outcome.code == 0
    # Ranks of machine 1 have learned from rank 0 which attempt this is.
    assert {path.name for path in run.logs(attempt).iterdir()} == {"m0-0.log", "m0-1.log", "m1-2.log", "m1-3.log"}
