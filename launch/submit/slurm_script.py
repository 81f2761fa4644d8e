"""The batch script of a run under Slurm: options for sbatch, and the supervisor that looks after the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import UserError
from ..base.own_command import PACKAGE
from ..base.processes import SIGNAL_NAMES
from ..supervise.policy import RestartLimits
from .check_first import resolve

VALUE = re.compile(r"[A-Za-z0-9_.,:;=@%+/*()\[\]&|!-]+")  # value of an sbatch option: no blanks, quotes or line ends
NAME = re.compile(r"[A-Za-z0-9_-]+")
LIMIT = re.compile(r"((?P<days>\d{1,5})-)?(?P<rest>\d{1,9}(:\d{1,9}){0,2})", re.ASCII)  # time limit for sbatch
PLACEHOLDER = re.compile(r"\{[a-z]+\}")
GRACE = round(RestartLimits.grace)  # seconds that ranks have at least to save
CORES = "8"  # for a rank with a GPU; slurm.sbatch has as many
# Whole nodes, unless the user asks otherwise: by the option itself or by one that Slurm takes in its place.
DEFAULTS = {
    "cpus-per-task": (CORES, ("cpus-per-gpu",)),
    "mem": ("0", ("mem-per-cpu", "mem-per-gpu")),  # 0: all that a node has
    "exclusive": ("", ("oversubscribe",)),
}
RESERVE = 60  # seconds that are left before the time limit when ranks that have not saved are killed


@dataclass(frozen=True)
class SlurmRequest:
    """Request to Slurm, and the command to run there."""

    run: Path  # the folder of the run
    name: str
    nodes: int  # nodes that train
    spares: int  # nodes that wait to take the place of one that fails
    least_nodes: int  # with fewer healthy ones, the job does not train
    ranks: int  # on each node: one per GPU
    warning: int  # seconds before the time limit at which ranks are told to save and stop
    options: Mapping[str, str]  # options of sbatch, without dashes; an empty value: an option that takes none
    srun: Sequence[str]  # options of srun, such as a container's
    preflight: str  # off, light or full
    thresholds: str | None  # a file of the site's own limits for preflight
    gpus: int  # GPUs that a node should have
    trainer: str  # the Python that has megalite, for what preflight measures
    python: str  # the Python that runs the supervisor, outside of any container
    megalite: str  # the command, as ranks call it
    arguments: Sequence[str]  # arguments of megalite train
    folder: str  # in which the job runs: paths of the configuration may be relative to it
    frozen: Path | None  # the configuration as it was when the job was submitted; None: it could not be read here
    as_edited: bool  # whether attempts use what the files of the configuration say then


def limit_seconds(text: str) -> int | None:
    """Seconds of a time limit as sbatch takes it; None for no limit, or for a text of another form.

    Its forms are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    found = LIMIT.fullmatch(text)
    if not found:
        return None
    days, parts = found["days"], [int(part) for part in found["rest"].split(":")]
    if days is None:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    else:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    whole = (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
    return whole or None  # 0 is no limit


def batch_script(job: SlurmRequest) -> str:
    """The text of the script. Raises UserError for an option that Slurm would not take from a script."""
    asked = {
        "job-name": job.name,
        "nodes": str(job.nodes + job.spares),
        "ntasks-per-node": str(job.ranks),
        "chdir": job.folder,
        "output": f"{str(job.run).replace('%', '%%')}/logs/slurm-%j.log",
        "open-mode": "append",
        "signal": f"B:USR2@{job.warning}",
        "requeue": "",
        "no-kill": "",
        **{
            name: text
            for name, (text, others) in DEFAULTS.items()
            if not job.options.keys() & {*others} and (job.gpus or name != "cpus-per-task")
        },
        **job.options,
    }
    lines = [f"#SBATCH {option_line(name, value)}" for name, value in asked.items()]
    arguments = job.arguments if job.frozen is None or job.as_edited else [str(job.frozen)]
    check = [job.megalite, "train", "--check", "--world-size", "{ranks}", "--", *arguments]
    frozen = [] if job.frozen is None else frozen_options(job.frozen, job.megalite, job.arguments)
    supervisor = [
        *(job.python, str(PACKAGE), "supervise"),
        *("--run", str(job.run), "--nodes", str(job.nodes), "--min-nodes", str(job.least_nodes)),
        *("--spares", str(job.spares), "--ranks-per-node", str(job.ranks), "--check", _joined(check)),
        *("--grace-seconds", str(max(GRACE, job.warning - RESERVE)), "--preflight", job.preflight),
        *(("--preflight-command", _joined(_preflight(job))) if job.preflight != "off" else ()),
        *(() if job.thresholds is None else ("--thresholds", job.thresholds)),
        *(f"--srun-option={option}" for option in job.srun),
        *frozen,
    ]
    command = [job.megalite, "train", *arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by megalite-launch. Submit it again with:  sbatch THIS_FILE",
            *lines,
            f"trap : {SIGNAL_NAMES.replace(',', ' ')}",
            f"early=(env '--block-signal={SIGNAL_NAMES}')  # what comes before the supervisor can hear it waits",
            '"${early[@]}" true 2>/dev/null || early=()  # GNU coreutils before 8.31 cannot',
            'exec "${early[@]}" ' + wrapped([*supervisor, "--", *command]),
            "",
        ]
    )


def frozen_options(frozen: Path, megalite: str, arguments: Sequence[str]) -> list[str]:
    """The supervisor's options for a configuration that was frozen."""
    return ["--frozen", str(frozen), "--resolve", _joined(resolve(megalite, arguments))]


def _joined(words: Sequence[str]) -> str:
    """A command as one option of the supervisor, which fills in what stands in braces."""
    return " ".join(word if PLACEHOLDER.fullmatch(word) else shlex.quote(word) for word in words)


def _preflight(job: SlurmRequest) -> list[str]:
    """Command that checks a node, in which the supervisor fills in the level and the attempt's folder."""
    words = [job.python, str(PACKAGE), "preflight", "--level", "{mode}", "--attempt", "{attempt}"]
    words += ["--nodes", "{nodes}", "--port", "{port}"]
    words += [] if job.thresholds is None else ["--thresholds", job.thresholds]
    return [*words, "--run", str(job.run), "--gpus", str(job.gpus), "--python", shlex.quote(job.trainer)]


def option_line(name: str, value: str) -> str:
    """An option as a line of the script has it."""
    if not NAME.fullmatch(name):
        raise UserError(f"--sbatch {name}: is no option of sbatch; give it without dashes, as in reservation=NAME")
    if not value:
        return f"--{name}"
    if name in ("output", "chdir"):  # a path, which may have any name
        if any(character in value for character in '"\\\n'):
            what = "a run folder" if name == "output" else "the folder of a start"
            raise UserError(f"{value}: {what} under Slurm must have no quotes, backslashes or line ends in its name")
        return f'--{name}="{value}"'
    if not VALUE.fullmatch(value):
        raise UserError(f"--{name} {value!r}: Slurm's scripts allow only letters, digits and {',:;=@%+/*()[]&|!._-'}")
    return f"--{name}={value}"


def wrapped(words: Sequence[str]) -> str:
    """A command for the shell, an option to a line."""
    lines = [""]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {shlex.quote(word)}".strip()
    return " \\\n    ".join(lines)
