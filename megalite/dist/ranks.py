"""Which rank this process is, from what its launcher says. Imports no torch."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config.errors import InputError


@dataclass(frozen=True)
class Place:
    """This process among the processes of the job."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this node


HELD_BACK = 5.0  # seconds; longer than torchrun and Slurm take to end a job of which one rank has failed
LAUNCHERS = (  # rank, world size, local rank
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, and megalite's own local launcher
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # srun
)


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place given by torchrun or Slurm; None when the process was started by itself.

    A Slurm step of one task is an interactive shell, or a script that starts its ranks itself: no place.
    """
    for names in LAUNCHERS:
        values = [environment.get(name) for name in names]
        if None in values or (names[0].startswith("SLURM") and values[1] == "1"):
            continue
        try:
            return Place(*(int(value or "") for value in values))
        except ValueError:
            found = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            raise InputError(f"the launcher's variables must be whole numbers, not {found}") from None
    return None


def let_others_speak(code: int) -> None:
    """Hold back an error that may only repeat another rank's, or follow from it.

    If it does, the launcher ends this process meanwhile, which then silently gives the exit code `code`.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(HELD_BACK)
