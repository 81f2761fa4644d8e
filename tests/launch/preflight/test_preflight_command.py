"""megalite-preflight as people and the supervisor call it."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result, in_process
from fake_smi import FakeSmi

import megalite_launch
from megalite.cost.cluster import load_cluster
from megalite_launch.commands import run as run_program
from megalite_launch.preflight import kernel_log
from megalite_launch.preflight.preflight_command import CODES

Preflight = Callable[..., Result]
ANSWER = {
    "versions": {"torch": "2.13.0", "nccl": "2.28.3"},
    "matmul": 700e12,
    "digest": "ab",
    "steady": True,
    "to_device": 55e9,
    "to_host": 54e9,
    "all_reduce": 465e9,
    "right": True,
}
VERSIONS = {"commit": "c0", "megalite": "0.1.0", "torch": "2.13.0", "nccl": None, "python": "3.11.7"}


def old_python_works() -> bool:
    """Whether there is a Python 3.9; pyenv puts a program of that name there in any case."""
    found = shutil.which("python3.9")
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints/step-00000010").mkdir(parents=True)
    (folder / "checkpoints/step-00000010/weights").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Limits that any machine keeps which runs the tests."""
    path = tmp_path / "site.yaml"
    path.write_text("all:\n  shm_gib: 0\n  checkpoints_fail: 0\n  checkpoints_warn: 0\n  inodes: 0\n")
    return path


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The command of a pretended Python: it measures nothing, and is GPUs of a kind that this machine lacks."""
    path = tmp_path / "fake python"
    path.write_text(
        f"""#!/bin/sh
case "$2" in
  *versions) echo '{json.dumps(VERSIONS)}' ;;
  *probe) echo "$@" >>"{tmp_path}/asked"; echo '{json.dumps(ANSWER)}' ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""
    )
    path.chmod(0o755)
    return shlex.quote(str(path))


@pytest.fixture
def preflight(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Preflight:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr(kernel_log, "COMMANDS", ())
    return in_process(lambda arguments: run_program("preflight", arguments), capsys)


def results(report: Path) -> dict[str, str]:
    found = json.loads(report.read_text())
    keys = {"failures": "fail", "warnings": "warn", "unchecked": "unchecked", "fine": "ok"}
    return {finding["check"]: result for key, result in keys.items() for finding in found[key]}


def test_a_node_with_gpus_is_checked_in_full(
    preflight: Preflight, run: Path, site: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smi").mkdir()
    FakeSmi(tmp_path / "smi", gpus=8).on_path(monkeypatch)
    out, report = tmp_path / "cluster.yaml", tmp_path / "report.json"
    code, printed, errors = preflight(
        *("--full", "--run", run, "--gpus", 8, "--python", python, "--node", "n1", "--thresholds", site),
        *("--json", report, "--attempt", run / "attempts/1.0.0", "--write-cluster", out),
    )
    assert (code, errors) == (0, ""), printed
    assert printed.splitlines()[0] == "n1 · NVIDIA H100 80GB HBM3 · full"
    assert printed.splitlines()[-1].startswith("passed: 0 failed, 0 warned")
    assert {check for check, result in results(report).items() if result != "ok"} == {
        "retired pages",
        "Xid since boot",
        "read back",
    }
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 8
    assert set(results(report)) <= documented()
    assert all(any(f"--device cuda --local-rank {place} " in line for line in asked) for place in range(8))
    assert not list((run / "checkpoints").glob(".preflight*"))
    node = json.loads((run / "attempts/1.0.0/preflight-n1.json").read_text())
    assert node["versions"] == VERSIONS | {"driver": "550.54.15", "nccl": "2.28.3"}
    assert {"passed", "failures", "warnings", "measured", "level"} <= set(node)
    cluster = load_cluster(str(out))
    assert cluster.gpu.measured["bf16"] == 700e12
    assert cluster.gpu.host == 54e9
    assert cluster.levels[-1].link.bandwidth == 450e9  # not above the link's
    assert "465.0 GB/s, above the link's 450.0" in cluster.sources["node.bandwidth"]
    assert cluster.network == load_cluster("h100_sxm").network


def test_a_sick_gpu_ends_with_1_and_is_compared_with_the_last_time(
    preflight: Preflight, run: Path, site: Path, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = FakeSmi(tmp_path)
    smi.on_path(monkeypatch)
    first = ("--run", run, "--gpus", 2, "--python", python, "--node", "n1", "--thresholds", site)
    assert preflight(*first, "--attempt", run / "attempts/1.0.0")[0] == 0
    smi.cell("ecc", 0, "corrected", "5")
    smi.cell("ecc", 1, "uncorrected", "2")
    code, printed, _ = preflight(*first, "--json", tmp_path / "r.json")
    assert code == 1
    assert "ECC uncorrectable  FAIL" in printed
    assert results(tmp_path / "r.json")["ECC corrected"] == "warn"


def documented() -> set[str]:
    """The checks that docs/preflight.md names."""
    page = (Path(__file__).parents[3] / "docs/preflight.md").read_text()
    names = set(re.findall(r"`([^`\n]+)`", page))
    return names | {f"{name} version" for name in names}


def test_this_machine_is_measured_for_real(
    preflight: Preflight, run: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, report = tmp_path / "cluster.yaml", tmp_path / "report.json"
    code, printed, errors = preflight(
        *("--full", "--gpus", 0, "--run", run, "--json", report, "--write-cluster", out, "--cluster", "l40s"),
        *("--thresholds", site),
        *("--probe-seconds", 0.05, "--probe-size", "64kiB", "--write-size", "4MiB"),
    )
    assert (code, errors) == (0, ""), printed
    found = json.loads(report.read_text())
    assert found["gpu"] == "cpu"
    assert [gpu["steady"] for gpu in found["measured"]["gpus"]] == [True, True]
    assert found["measured"]["all_reduce"] / 1 > 1e7 or found["measured"]["all_reduce"] > 0
    assert results(report)["result bits"] == "ok"
    assert results(report)["all-reduce sums"] == "ok"
    cluster = load_cluster(str(out))
    assert 1e8 < cluster.gpu.measured["fp32"] < 1e13
    assert cluster.gpus_per_node == 2
    assert found["versions"]["torch"].startswith("2.")


def nodes_together(names: list[str], *words: object, late: float = 0.0) -> list[tuple[str, str]]:
    """What each node prints, where the others come some seconds after the first."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "megalite_launch", "preflight", "--nodes", ",".join(names), "--port", str(port)]
    running = []
    for name in names:
        own = [*command, "--node", name, *map(str, words)]
        running.append(subprocess.Popen(own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        time.sleep(late if name == names[0] else 0.0)
    return [process.communicate(timeout=60) for process in running]


def test_nodes_check_each_other_and_are_compared(preflight: Preflight, run: Path, python: str, tmp_path: Path) -> None:
    names = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    attempt, out = run / "attempts/7.0.0", tmp_path / "cluster.yaml"
    done = nodes_together(
        *(names, "--full", "--gpus", 0, "--run", run, "--attempt", attempt, "--python", python, "--write-size", "1MiB")
    )
    for printed, errors in done:
        assert "passed: 0 failed" in printed, (printed, errors)
    found = {name: json.loads((attempt / f"preflight-{name}.json").read_text()) for name in names}
    for place, name in enumerate(names):
        measured = found[name]["measured"]
        assert measured["read_back"]["of"] == names[place - 1]
        assert measured["read_back"]["match"]
        assert measured["clock"]["reference"] == names[0]
        assert abs(measured["clock"]["offset"]) < 0.05  # the same clock
        assert {pair["partner"] for pair in measured["pairs"]} == set(names) - {name}
        assert all(pair["rate"] == 465e9 for pair in measured["pairs"])
    assert not list((run / "checkpoints").glob(".preflight*"))
    code, printed, errors = preflight(
        "--compare", attempt, "--write-cluster", out, "--cluster", "h200", "--nodes", ",".join(names)
    )
    assert (code, errors) == (0, "")
    assert [line.split()[:2] for line in printed.splitlines()[1:]] == [[name, "ok"] for name in names]
    assert load_cluster(str(out)).network.bandwidth == 465e9
    code, printed, _ = preflight("--compare", attempt, "--nodes", ",".join([*names, "n9"]), "--json", tmp_path / "j")
    assert {
        found["check"] for node in json.loads((tmp_path / "j").read_text())["nodes"].values() for found in node["fine"]
    } <= documented()
    assert code == 1
    assert json.loads((tmp_path / "j").read_text())["bad"] == {"n9": "has not finished its preflight: it left no file"}


def handles(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether a process has a handler for a signal (Linux)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_node_that_waits_for_another_one_ends_on_a_signal(run: Path, python: str) -> None:
    words = ("--node", "127.0.0.2", "--nodes", "127.0.0.1,127.0.0.2", "--port", "1", "--gpus", "0", "--run", str(run))
    alone = [sys.executable, "-m", "megalite_launch", "preflight", *words, "--python", python]
    process = subprocess.Popen(alone, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not handles(process, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.communicate()
    assert not list((run / "checkpoints").glob(".preflight*"))


def test_the_first_node_waits_for_those_that_come_later(tmp_path: Path, python: str) -> None:
    names = ["127.0.0.1", "127.0.0.2"]
    words = ("--level", "light", "--gpus", 0, "--python", python, "--attempt", tmp_path / "attempt")
    nodes_together(names, *words, late=1.0)
    node = json.loads((tmp_path / "attempt/preflight-127.0.0.2.json").read_text())
    assert (node["level"], node["measured"]["clock"]["reference"]) == ("light", names[0])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--run", "none"], "--run none: is no folder; give that of a run"),
        (["--checkpoints", "none"], "--checkpoints none: is no folder"),
        (["--checkpoint-size", "big"], "--checkpoint-size: 'big' must be a size above 0, as 350GiB"),
        (["--probe-size", "0"], "--probe-size: '0' must be a size above 0"),
        (["--probe-seconds", "100"], "--probe-seconds 100.0: must be from 0 to 30"),
        (["--node", "a/b"], "--node 'a/b': must be a name of letters"),
        (["--node", "a", "--nodes", "b,c"], "--nodes b,c: a is not among them"),
        (["--nodes", "a[1-3]"], "--nodes: 'a[1-3]' is no name of a node; give names with commas, without brackets"),
        (["--nodes", "a,a"], "--nodes: a name is there twice"),
        (["--thresholds", "none"], "none: cannot be read: No such file or directory"),
        (["--python", "'"], "--python ': No closing quotation"),
        (["--python", ""], "--python: names no command"),
        (["--write-cluster", "x.yaml"], "--write-cluster: needs --full"),
        (["--full", "--write-cluster", "x.txt"], "--write-cluster x.txt: must end in .yaml"),
        (["--full", "--write-cluster", "no/x.yaml"], "--write-cluster no/x.yaml: there is no folder no"),
        (["--node", "a", "--nodes", "a,b", "--full", "--write-cluster", "x.yaml"], "--write-cluster: one node of"),
        (["--compare", "none"], "none: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_message(preflight: Preflight, words: list[str], problem: str) -> None:
    code, printed, errors = preflight(*words)
    assert (code, printed) == (2, "")
    assert errors.startswith(f"megalite-preflight: error: {problem}")
    assert errors.count("\n") == 1


def test_a_port_that_is_taken_is_bad_input(preflight: Preflight) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, errors = preflight("--gpus", 0, "--node", "a", "--nodes", "a,b", "--port", port)
    assert code == 2
    assert f"--port {port}: cannot be listened at: Address already in use" in errors


def test_a_cluster_file_that_cannot_be_made_is_bad_input(
    preflight: Preflight, run: Path, python: str, tmp_path: Path
) -> None:
    words = ("--full", "--gpus", 0, "--run", run, "--python", python, "--write-cluster", tmp_path / "x.yaml")
    code, _, errors = preflight(*words)
    assert (code, "no cluster file is known for cpu; name one like it with --cluster" in errors) == (2, True)
    code, _, errors = preflight(*words, "--cluster", "none.yaml")
    assert (code, "none.yaml" in errors) == (2, True)
    assert not (tmp_path / "x.yaml").exists()


def test_an_environment_that_does_not_work_fails(preflight: Preflight, run: Path) -> None:
    code, printed, _ = preflight("--gpus", 0, "--run", run, "--python", "false", "--full")
    assert code == 1
    assert [line.split()[1] for line in printed.splitlines() if line.startswith(("versions ", "probe "))] == [
        "FAIL"
    ] * 2
    assert "FAILED: versions: false: ended with 1: nothing; probe: " in printed.splitlines()[-1]


def test_nothing_but_the_standard_library_is_imported() -> None:
    code = """
import sys
before = set(sys.modules)  # an editable installation has its own finder
import megalite_launch.preflight.preflight_command, megalite_launch.preflight.versions
found = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(found - sys.stdlib_module_names - {"megalite_launch"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not old_python_works(), reason="needs a Python 3.9")
def test_the_python_of_an_old_login_node_is_enough(run: Path, python: str, tmp_path: Path) -> None:
    (tmp_path / "megalite_launch").symlink_to(Path(megalite_launch.__file__).parent)
    words = ["--gpus", "0", "--run", str(run), "--python", python]
    command = ["python3.9", "-m", "megalite_launch", "preflight", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_help_tells_the_exit_codes(preflight: Preflight, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        preflight("--help")
    assert end.value.code == 0
    assert CODES in capsys.readouterr().out
