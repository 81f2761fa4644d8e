"""Which build of PyTorch a machine without a GPU installs."""

import re
from pathlib import Path

import pytest

from megalite_tools import cpu_build

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
FOUND = "torch ({0})\nAvailable versions: {0}, 2.12.1+cpu, 2.12.1, 2.11.0+cpu, 2.11.0, 1.13.1+cpu\n"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (FOUND.format("2.14.1"), ["torch==2.12.1+cpu", "triton==3.7.*"]),
        (FOUND.format("2.13.0+cpu"), ["torch==2.13.0+cpu", "triton==3.7.*"]),
        (FOUND.format("2.99.0+cpu"), ["torch==2.12.1+cpu", "triton==3.7.*"]),  # not supported yet
        ("torch (2.14.1)\nAvailable versions: 2.14.1, 2.14.1+cu130, 2.14.1+cpu.cxx11.abi", []),
        ("", []),  # no index
    ],
)
def test_the_newest_small_build_that_is_supported(versions: str, expected: list[str]) -> None:
    assert cpu_build.constraints(versions, cpu_build.allowed(PROJECT)) == expected


def test_every_supported_pytorch_has_its_triton() -> None:
    assert list(cpu_build.TRITONS) == list(cpu_build.allowed(PROJECT))
    lowest, above = re.findall(r'"triton>=3\.(\d+),<3\.(\d+) ;', PROJECT)[0]
    assert {text.split(".")[1] for text in cpu_build.TRITONS.values()} == set(map(str, range(int(lowest), int(above))))


def test_a_machine_with_a_gpu_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_build, "GPUS", (str(tmp_path),))
    monkeypatch.setattr(cpu_build.subprocess, "run", None)
    cpu_build.main()
    assert capsys.readouterr().out == ""
