"""`megalite list`: a line for everything that megalite comes with, and its text."""

import pytest

from megalite.commands import main
from megalite.commands.list_presets import purpose, scripts
from megalite.config.load import load
from megalite.config.presets import KINDS, presets
from megalite.plan.model.size import model_parameters


def test_every_name_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    names = [*(name for kind in KINDS for name in presets(kind)), *scripts()]
    assert [line[0] for line in lines if line[0] in names and len(line) > 1] == names
    assert [line[0] for line in lines if len(line) == 1 and line[0].isalpha()] == [
        "Models",
        "Runs",
        "Experiments",
        "Clusters",
        "Scripts",
    ]


@pytest.mark.parametrize("name", presets("model"))
def test_a_model_has_its_number_of_parameters(name: str) -> None:
    assert f" {model_parameters(load([name]).model).total:,} parameters" in purpose(presets("model")[name])


def test_a_purpose_is_one_sentence() -> None:
    assert purpose(presets("run")["llama3_8b_64gpu"]) == "Llama 3 8B on 64 GPUs of 80 GB: FSDP alone"
    wanted = "A scaling law: three sizes times three budgets, and what a larger budget would buy"
    assert purpose(presets("experiment")["ladder"]) == wanted
    assert purpose(scripts()["local.sh"]).startswith("Train on this machine under torchrun")
    everything = [*(path for kind in KINDS for path in presets(kind).values()), *scripts().values()]
    assert all(10 < len(purpose(path)) < 220 for path in everything)


def test_a_file_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", "slurm.sbatch"]) == 0
    assert capsys.readouterr().out == scripts()["slurm.sbatch"].read_text()


def test_an_unknown_name_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", "tiny", "slurm.batch"]) == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert "slurm.batch: megalite comes with no such file; did you mean slurm.sbatch" in told
