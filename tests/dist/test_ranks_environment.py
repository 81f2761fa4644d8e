import subprocess
import sys

import pytest

from megalite.config.errors import InputError
from megalite.dist.ranks import Place, find_place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),
        (TORCHRUN, Place(5, 8, 1)),
        (SLURM, Place(3, 4, 0)),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Place(0, 1, 0)),
    ],
    ids=["nothing", "a batch script of Slurm", "torchrun", "srun", "srun of one task", "torchrun of one rank"],
)
def test_the_place_is_what_the_launcher_says(environment: dict[str, str], place: Place | None) -> None:
    assert find_place(environment) == place


def test_torchrun_inside_a_slurm_job_wins() -> None:
    assert find_place(SLURM | TORCHRUN) == Place(5, 8, 1)


@pytest.mark.parametrize("name", TORCHRUN)
def test_half_a_launcher_is_none(name: str) -> None:
    assert find_place({key: value for key, value in TORCHRUN.items() if key != name}) is None


@pytest.mark.parametrize("value", ["", "two", "1.5"])
@pytest.mark.parametrize(("launcher", "name"), [(TORCHRUN, "RANK"), (SLURM, "SLURM_PROCID")])
def test_what_is_no_number_is_named(launcher: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"must be whole numbers.*{name}={value}"):
        find_place(launcher | {name: value})


def test_finding_the_place_and_launching_need_no_torch() -> None:
    script = "import sys, megalite.dist.ranks, megalite.dist.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
