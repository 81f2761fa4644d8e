"""launch/local.sh: the ranks under torchrun."""

from pathlib import Path
from types import SimpleNamespace

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


def test_what_only_ranks_can_find_is_told_once(work: SimpleNamespace) -> None:
    done = work.run(SCRIPT, "config.yaml", "run.name=lost", "data.train=[{path: lost}]", NPROC="4")
    assert done.returncode != 0
    assert done.stderr.count("no such file: lost.bin and lost.idx") == 1
