"""Looks after a training job: starts its ranks, sees how they end, and starts them again or has Slurm do so.

In the batch script of a Slurm job, outside of any container:

    exec env --block-signal=TERM,INT,HUP,USR1,USR2 \\
        python3 -m megalite_launch supervise --run RUN --ranks-per-node 8 -- megalite train CONFIG…

RUN is the run folder, run.dir/run.name of the configuration. On one machine, `--backend local` restarts the command
after a crash or a hang. docs/launch.md tells what is done after which event.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.arguments import natural, seconds, words
from ..base.errors import UserError
from ..base.outcome import BAD_INPUT, FAILED
from ..base.processes import HANDLED_SIGNALS
from ..base.run_folder import RunFolder
from ..base.slurm import Slurm
from ..preflight.thresholds import load_thresholds
from .backend import Backend
from .frozen_configuration import Frozen
from .local_backend import LocalBackend
from .policy import RestartLimits, Wants
from .slurm_backend import Options, SlurmBackend
from .supervisor import Check, Supervisor

LIMITS = RestartLimits()
CHECK_SECONDS = 600.0  # seconds that a check of the configuration may take


def parser() -> argparse.ArgumentParser:
    """The options, which launchers write into batch scripts."""
    found = argparse.ArgumentParser(
        prog="megalite-supervise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="the run folder")
    found.add_argument("--backend", choices=("slurm", "local"), default="slurm")
    found.add_argument("command", nargs="+", metavar="COMMAND", help="what every rank runs (local: the launcher)")
    nodes = found.add_argument_group("nodes")
    nodes.add_argument("--nodes", type=natural, default=0, help="to train on (default: all of the job but the spares)")
    nodes.add_argument(
        "--min-nodes", type=natural, default=0, help="to train on if there are no more (default: --nodes)"
    )
    nodes.add_argument("--spares", type=natural, default=0, help="nodes of the job that wait for others to fail")
    nodes.add_argument("--ranks-per-node", type=natural, default=1, help="one for each GPU")
    nodes.add_argument("--master", default="", metavar="HOST", help="by which ranks reach rank 0 (default: its node)")
    nodes.add_argument(
        "--srun-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="for the srun of the ranks, as --srun-option=--container-image=IMAGE; may be repeated",
    )
    checks = found.add_argument_group("checks")
    checks.add_argument(
        "--check",
        type=words,
        default=[],
        metavar="COMMAND",
        help="ends with 0 where training fits {ranks} ranks, as 'megalite train --check --world-size {ranks} CONFIG'",
    )
    checks.add_argument(
        "--preflight",
        choices=("light", "full", "off"),
        default="off",
        help="of every node before an attempt; full: at the first, and after a hang. off: only whether it answers",
    )
    checks.add_argument(
        "--preflight-command",
        type=words,
        default=[],
        metavar="COMMAND",
        help="runs on every node and ends with 0 if it is fit; {mode} is light or full, {attempt} the attempt's "
        "folder, {nodes} all nodes with commas, {port} a free port of the first",
    )
    checks.add_argument("--thresholds", type=Path, metavar="FILE", help="the site's own, by which nodes are compared")
    checks.add_argument("--preflight-seconds", type=seconds, default=180.0, metavar="S", help="that it may take")
    frozen = found.add_argument_group("configuration")
    frozen.add_argument("--frozen", type=Path, metavar="FILE", help="as it was when the job was submitted")
    frozen.add_argument(
        "--resolve", type=words, default=[], metavar="COMMAND", help="prints it as it is now; what differs is told"
    )
    bounds = found.add_argument_group("bounds")
    for name, default, text in (
        ("attempts", LIMITS.attempts, "in a row without a newer checkpoint, after which the job ends"),
        ("requeues", LIMITS.requeues, "of the job, after which it ends"),
        ("strikes", LIMITS.strikes, "failures of a node within a day, after which it is left out"),
    ):
        bounds.add_argument(f"--max-{name}", type=natural, default=default, metavar="N", help=f"{text} ({default})")
    bounds.add_argument(
        "--oom-ends", action="store_true", help="end when a GPU is out of memory, where no other attempt would differ"
    )
    for name, usual, text in (
        ("reap", LIMITS.reap, "from a rank's failure to the kill of those that do not end"),
        ("grace", LIMITS.grace, "from a request to stop to the kill"),
        ("silence", LIMITS.silence, "without a sign of progress in the run folder until ranks are killed; 0: never"),
        ("patience", LIMITS.patience, "with a Slurm that does not answer"),
        ("guard", 60.0, "without a sign of life of the batch host, after which the guard requeues the job"),
    ):
        told = f"seconds {text} ({usual:.0f})"
        bounds.add_argument(f"--{name}-seconds", type=seconds, default=usual, metavar="S", help=told)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise. Returns the exit code: docs/exit_codes.md."""
    options = parser().parse_args(arguments)
    run = RunFolder(options.run.absolute())
    limits = RestartLimits(
        attempts=options.max_attempts,
        requeues=options.max_requeues,
        strikes=options.max_strikes,
        reap=options.reap_seconds,
        grace=options.grace_seconds,
        silence=options.silence_seconds,
        patience=options.patience_seconds,
        oom_ends=options.oom_ends,
    )
    run.check()
    load_thresholds(options.thresholds)
    backend = _backend(options, run)
    wants = Wants(options.nodes, options.min_nodes, options.spares, options.ranks_per_node)
    used = str(options.frozen) not in options.command
    frozen = None if options.frozen is None else Frozen(options.frozen, options.resolve, used)
    supervisor = Supervisor(run, options.command, backend, wants, limits, _checker(options.check), frozen=frozen)
    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or options.backend == "slurm":  # nohup has SIGHUP ignored
            signal.signal(number, supervisor.hear)
    # the batch script holds them up until there are handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    return supervisor.run()


def _backend(options: argparse.Namespace, run: RunFolder) -> Backend:
    if options.nodes and options.min_nodes > options.nodes:
        raise UserError(f"--min-nodes {options.min_nodes}: must be at most --nodes {options.nodes}")
    if options.preflight != "off" and not options.preflight_command:
        raise UserError(f"--preflight {options.preflight}: needs --preflight-command")
    if options.backend == "local":
        return LocalBackend(run)
    job, restart = _job(), os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not restart.isdigit():
        raise UserError("no SLURM_JOB_ID: this must run in the batch script of a Slurm job; or give --backend local")
    how = Options(
        ranks_per_node=max(1, options.ranks_per_node),
        preflight=options.preflight,
        preflight_command=options.preflight_command,
        preflight_seconds=options.preflight_seconds,
        thresholds=options.thresholds,
        srun=options.srun_option,
        guard_seconds=options.guard_seconds,
        patience=options.patience_seconds,
        master=options.master,
    )
    return SlurmBackend(Slurm(job), int(restart), run.path, how, time.sleep)


def _job() -> str:
    """The job of the environment. A task of an array goes by JOB_TASK: one of them has the id of the whole array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def _checker(command: Sequence[str]) -> Callable[[int], Check]:
    """Return a function that checks the configuration for a number of ranks."""

    def check(ranks: int) -> Check:
        if not command:
            return Check(0)
        words = [word.replace("{ranks}", str(ranks)) for word in command]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Check(FAILED, f"{words[0]} took longer than {CHECK_SECONDS:.0f} s")
        except OSError as error:
            return Check(BAD_INPUT, f"{words[0]}: {error.strerror}")
        told = done.stderr.decode(errors="replace").strip() or f"{words[0]} ended with {done.returncode}"
        return Check(done.returncode, told)

    return check
