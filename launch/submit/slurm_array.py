"""Job arrays: many runs of one shape, each a task of its own. megalite-sweep writes and submits them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.processes import SIGNAL_NAMES
from ..base.slurm import Call, call
from .slurm_script import option_line, wrapped

DEFAULT_ARRAY_SIZE = 1001  # tasks of an array that Slurm allows unless it says otherwise: MaxArraySize
SIZE = re.compile(r"^MaxArraySize\s*=\s*(\d{1,9})$", re.MULTILINE)
ELEMENT = re.compile(r"(\d{1,10}_\d{1,7}) ([A-Z_]+)")
SUBMISSION = re.compile(r"(\d{1,15})(;.*)?")


@dataclass(frozen=True)
class Array:
    """Request to Slurm for an array of tasks."""

    name: str
    tasks: int
    parallel: int  # at a time
    nodes: int
    ranks: int  # on each node
    log: Path  # %a in its name stands for the task
    warning: int  # seconds before the time limit at which runs are told to save and stop
    options: Mapping[str, str]  # options of sbatch, without dashes; an empty value: an option that takes none
    after: str = ""  # the id of a job that comes before
    command: Sequence[str] = ()  # command that does the task SLURM_ARRAY_TASK_ID


def array_script(array: Array) -> str:
    """The text of the batch script. Raises UserError for an option that Slurm would not take from a script."""
    asked = {
        "job-name": array.name,
        "array": f"0-{array.tasks - 1}%{array.parallel}",
        "nodes": str(array.nodes),
        "ntasks-per-node": str(array.ranks),
        "output": str(array.log),
        "open-mode": "append",
        "signal": f"B:USR2@{array.warning}",
        "requeue": "",
        "no-kill": "",
        **({"dependency": f"afterany:{array.after}"} if array.after else {}),
        **array.options,
    }
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by megalite. Submit it again with:  sbatch THIS_FILE",
            *(f"#SBATCH {option_line(name, value)}" for name, value in asked.items()),
            f"trap : {SIGNAL_NAMES.replace(',', ' ')}",
            f"early=(env '--block-signal={SIGNAL_NAMES}')  # what comes before the runner can hear it waits",
            '"${early[@]}" true 2>/dev/null || early=()  # GNU coreutils before 8.31 cannot',
            'exec "${early[@]}" ' + wrapped(array.command),
            "",
        ]
    )


def largest_array(ask: Call = call) -> int:
    """The most tasks of an array: MaxArraySize is above the largest index. Without an answer, Slurm's own default."""
    answer = ask(["scontrol", "show", "config"])
    found = SIZE.search(answer.out) if answer.code == 0 else None
    return max(int(found[1]), 1) if found else DEFAULT_ARRAY_SIZE


def element_states(jobs: Sequence[str], ask: Call = call) -> dict[str, str] | None:
    """Slurm's states of the tasks of arrays, by JOB_TASK; tasks that it does not know are left out.

    None if Slurm gives no answer. Tasks that ended some time ago are known only to the accounting, where there is one.
    """
    if not jobs:
        return {}
    queue = ask(["squeue", "--noheader", "--array", "--states=all", "--me", "--format", "%i %T"])
    if queue.code:
        return None
    mine, known = tuple(f"{job}_" for job in jobs), {}
    for line in queue.out.splitlines():
        match = ELEMENT.fullmatch(line.strip())
        if match and match[1].startswith(mine):
            known[match[1]] = match[2]
    account = ask(
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", "--jobs", ",".join(jobs)]
    )
    for line in account.out.splitlines() if account.code == 0 else []:
        task, _, state = line.strip().partition("|")
        match = ELEMENT.fullmatch(f"{task} {state.partition(' ')[0]}")
        if match:
            known.setdefault(match[1], match[2])
    return known


def submitted(script: Path, ask: Call) -> tuple[str, str]:
    """Submit a script. Returns the id of its job, and why there is none; one of them is empty."""
    answer = ask(["sbatch", "--parsable", str(script)])
    match = SUBMISSION.fullmatch(answer.out.strip())
    if answer.code or match is None:
        return "", answer.error or f"sbatch ended with {answer.code} and said {answer.out[:100]!r}"
    return match[1], ""
