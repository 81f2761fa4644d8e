import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.distributed.start.ranks import RankInfo, find_rank_info

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "rank_info"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (TORCHRUN, RankInfo(5, 8, 1)),
        (SLURM, RankInfo(3, 4, 0)),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, RankInfo(0, 1, 0)),
    ],
    ids=[
        "nothing",
        "salloc",
        "a batch script of Slurm",
        "torchrun",
        "srun",
        "srun of one task",
        "torchrun of one rank",
    ],
)
def test_the_rank_is_what_the_launcher_says(environment: dict[str, str], rank_info: RankInfo | None) -> None:
    assert find_rank_info(environment) == rank_info


@pytest.mark.parametrize("inner", [{"TORCHELASTIC_RUN_ID": "x"}, {"MEGALITE_LAUNCHER": "7"}, {"WORLD_SIZE": "8"}])
def test_a_launcher_inside_a_task_of_slurm_wins(inner: dict[str, str]) -> None:
    variables = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    assert find_rank_info(SLURM | variables | inner) == RankInfo(2, int((variables | inner)["WORLD_SIZE"]), 2)
    assert find_rank_info(SLURM | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == RankInfo(3, 4, 0)


WRONG = [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2: LOCAL_RANK must be set too"),
    ({"WORLD_SIZE": "2"}, "RANK and LOCAL_RANK must be set too"),
    ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE must be set too"),
    (TORCHRUN | {"RANK": "8"}, "RANK=8 WORLD_SIZE=8 LOCAL_RANK=1: ranks are counted from 0"),
    (TORCHRUN | {"WORLD_SIZE": "0"}, "are below their number"),
    (TORCHRUN | {"LOCAL_RANK": "8"}, "are below their number"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 LOCAL_WORLD_SIZE=1: a local rank is below"),
    (SLURM | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "two launchers give this process two places"),
    (SLURM | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "two launchers give this process two places"),
    ({"SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS and SLURM_LOCALID must be set too"),
    ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "SLURM_STEP_NUM_TASKS must be set too"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "SLURM_LOCALID must be set too"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=2: mpirun does not set RANK"),
    ({"PMI_SIZE": "2"}, "PMI_SIZE=2: mpirun does not set RANK"),
]


@pytest.mark.parametrize(("environment", "told"), WRONG, ids=range(len(WRONG)))
def test_half_a_launcher_or_two_are_refused(environment: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=f"{told}.*; start ranks with torchrun, srun or launch/local.sh, or unset"):
        find_rank_info(environment)


@pytest.mark.parametrize("value", ["", "two", "1.5", "-1", "+1", "1_0", " 1", "٣", "9" * 5000])
@pytest.mark.parametrize(("launcher", "name"), [(TORCHRUN, "RANK"), (SLURM, "SLURM_PROCID")])
def test_what_is_no_number_is_named(launcher: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        find_rank_info(launcher | {name: value})
    assert str(caught.value).startswith(f"{name}={value}: the launcher's variables must be whole numbers")


SIZES = st.sampled_from(["0", "1", "2", "3", "4", "-1", "x", ""])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*TORCHRUN, *SLURM, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"]), SIZES))
def test_no_variables_make_a_rank_of_many_train_alone(environment: dict[str, str]) -> None:
    try:
        rank_info = find_rank_info(environment)
    except InputError:
        return
    if rank_info is None:
        assert not any(name in environment for name in TORCHRUN)
        assert environment.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        assert environment.get("SLURM_PROCID", "0") == "0" or environment["SLURM_STEP_NUM_TASKS"] == "1"
    else:
        assert 0 <= rank_info.rank < rank_info.world_size
        assert 0 <= rank_info.local_rank < rank_info.world_size
        named = [(environment.get(rank), environment.get(size)) for rank, size, _ in (TORCHRUN, SLURM)]
        assert (str(rank_info.rank), str(rank_info.world_size)) in named


def test_finding_the_rank_and_launching_need_no_torch() -> None:
    modules = "megalite.distributed.start.ranks, megalite.distributed.start.local"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
