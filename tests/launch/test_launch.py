"""launch/local.sh: the ranks under torchrun."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "local.sh"


def gpus(work: SimpleNamespace, command: str) -> dict[str, str]:
    """The environment of a machine on which nvidia-smi runs this shell command."""
    tools = work.folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{command}\n")
    (tools / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tools}:{work.environment['PATH']}"}


def test_torchrun_trains_as_the_local_launcher_does(work: SimpleNamespace, expected: list[float]) -> None:
    done = work.run(SCRIPT, "config.yaml", "run.name=torchrun", **gpus(work, "exit 9"))
    assert done.returncode == 0, done.stderr
    assert len(expected) == 4
    assert work.losses("torchrun") == expected
    logs = work.folder / "runs" / "torchrun" / "logs"
    assert [path.name for path in sorted(logs.iterdir())] == [f"rank_{rank:04d}.log" for rank in range(4)]


def test_bad_configuration_is_told_once_before_any_rank_starts(work: SimpleNamespace) -> None:
    done = work.run(SCRIPT, "config.yaml", "run.name=bad", "model.heads=3", NPROC="4")
    assert done.returncode == 2
    assert done.stderr.count("model.heads = 3: must be divisible by parallel.tp = 2") == 1
    assert not (work.folder / "runs" / "bad").exists()


def test_there_are_as_many_ranks_as_gpus(work: SimpleNamespace) -> None:
    done = work.run(SCRIPT, "config.yaml", **gpus(work, "echo 'GPU 0: one'; echo 'GPU 1: two'; echo 'GPU 2: three'"))
    assert done.returncode == 2
    assert "the job's 3; start 4 ranks" in done.stderr


@pytest.mark.parametrize(("arguments", "shown"), [(["--help"], "usage:"), (["--check", "config.yaml"], "ranks   4")])
def test_nothing_starts_where_nothing_is_asked_for(
    arguments: list[str], shown: str, work: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "torchrun").chmod(0o755)
    done = work.run(SCRIPT, *arguments, PATH=f"{tmp_path}:{work.environment['PATH']}")
    assert done.returncode == 0
    assert shown in done.stdout


def test_bad_data_is_told_once_before_torchrun_could_add_a_traceback(work: SimpleNamespace) -> None:
    done = work.run(SCRIPT, "config.yaml", "run.name=lost", "data.train=[{path: lost}]", NPROC="4")
    assert done.returncode == 2
    assert done.stderr.count("no such file: lost.bin and lost.idx") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("prefix", "handled"), [([], True), (["nohup"], False)], ids=["", "nohup"])
def test_arguments_signals_and_the_exit_code_pass_through(
    prefix: list[str], handled: bool, work: SimpleNamespace, tmp_path: Path
) -> None:
    for name, text in {"megalite": "echo ranks 3", "torchrun": 'printf "%s\\n" "$@"; exit 7'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = work.run(*prefix, SCRIPT, "a config.yaml", "run.name=$(x) *", PATH=f"{tmp_path}:{work.environment['PATH']}")
    assert done.returncode == 7
    *options, command, mode, config, name = done.stdout.splitlines()
    assert (command, mode, config, name) == ("megalite", "train", "a config.yaml", "run.name=$(x) *")
    assert "--nproc-per-node=3" in options
    (signals,) = (option for option in options if option.startswith("--signals-to-handle="))
    assert {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"} < set(signals.partition("=")[2].split(","))
    assert ("SIGHUP" in signals) == handled


@pytest.mark.parametrize("script", ["local.sh", "slurm.sbatch"])
def test_scripts_are_well_formed(script: str) -> None:
    path = SCRIPT.with_name(script)
    assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).stderr == b""
    if shellcheck := shutil.which("shellcheck"):
        command = [shellcheck, "--external-sources", path]  # of paths from the root
        assert subprocess.run(command, cwd=path.parents[1], capture_output=True, text=True, check=False).stdout == ""
