"""Rank of this process, from what its launcher says. Imports no torch."""

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.base.errors import InputError
from megalite.distributed.start.local import LAUNCHER


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process among the processes of the job."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this node


EXIT_DELAY = 5.0  # seconds; longer than torchrun and Slurm take to end a job of which one rank has failed
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun, and by megalite's own local launcher
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")  # set by srun
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # set by mpirun
INNER_VARIABLES = ("TORCHELASTIC_RUN_ID", LAUNCHER)  # set by launchers that can run inside a task of srun
NUMBER = re.compile("[0-9]{1,9}")
START_HINT = "start ranks with torchrun, srun or launch/local.sh, or unset these variables to start alone"


def find_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return this process's rank as torchrun or Slurm give it; None when the process was started by itself.

    None too in a Slurm step of one task, which is an interactive shell, or a script that starts its ranks itself.
    Raises InputError if the launcher's variables are incomplete or contradict each other: a rank that took itself for
    the only one would train alone.
    """
    step = _slurm_step(environment)
    if not any(name in environment for name in RANK_VARIABLES):
        for name in MPI_SIZES:
            if step is None and environment.get(name, "1") != "1":
                raise _refused((name,), environment, "mpirun does not set RANK, WORLD_SIZE and LOCAL_RANK")
        return step
    rank_info = _read(RANK_VARIABLES, environment)
    ranks_here = environment.get("LOCAL_WORLD_SIZE")
    if ranks_here is not None and rank_info.local_rank >= _number("LOCAL_WORLD_SIZE", ranks_here):
        raise _refused(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), environment, "a local rank is below the ranks of its node")
    nested = (
        step is None or rank_info.world_size > step.world_size or any(name in environment for name in INNER_VARIABLES)
    )
    if rank_info != step and not nested:
        raise _refused((*RANK_VARIABLES, *SLURM_VARIABLES), environment, "two launchers give this process two places")
    return rank_info


def _slurm_step(environment: Mapping[str, str]) -> RankInfo | None:
    """The rank that srun gives to a task of several; None for a task that is alone."""
    rank, size, local = map(environment.get, SLURM_VARIABLES)
    # A batch script has the variables of a first task, but is in no step.
    alone = size == "1" or (size is None and rank == local and rank in (None, "0"))
    return None if alone else _read(SLURM_VARIABLES, environment)


def _read(names: tuple[str, str, str], environment: Mapping[str, str]) -> RankInfo:
    missing = [name for name in names if name not in environment]
    if missing:
        raise _refused(names, environment, f"{' and '.join(missing)} must be set too")
    rank, size, local = (_number(name, environment[name]) for name in names)
    if rank >= size or local >= size:
        raise _refused(names, environment, "ranks are counted from 0, and are below their number")
    return RankInfo(rank, size, local)


def _number(name: str, text: str) -> int:
    if not NUMBER.fullmatch(text):
        raise InputError(f"{name}={text}: the launcher's variables must be whole numbers; {START_HINT}")
    return int(text)


def _refused(names: Sequence[str], environment: Mapping[str, str], rule: str) -> InputError:
    found = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
    return InputError(f"{found}: {rule}; {START_HINT}")


def end_silently_with(code: int) -> None:
    """Let SIGTERM end this process with an exit code and without a word from now on: it has failed already."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))


def let_others_speak(code: int) -> None:
    """Wait before reporting an error that may only repeat another rank's, or follow from it.

    If it does, the launcher ends this process during the wait. The process then says nothing, and its exit code is
    `code`.
    """
    end_silently_with(code)
    time.sleep(EXIT_DELAY)
