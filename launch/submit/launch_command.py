"""`megalite-launch`: checks a run, writes how it is started into its folder, starts it, and says what to watch."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.arguments import cluster_options, count, natural
from ..base.errors import UserError
from ..base.events import append_event, read_events
from ..base.files import give_new_name, write_whole
from ..base.outcome import DONE
from ..base.own_command import PACKAGE
from ..base.processes import HANDLED_SIGNALS
from ..base.run_folder import RunFolder
from ..preflight.thresholds import load_thresholds
from ..supervise.other_supervisors import local_rival, submitting
from .check_first import CheckedRun, CheckFailed, check, find_megalite, resolved
from .kubernetes import Pods, manifest
from .kubernetes_options import kubernetes_options, pods_of
from .overlay import read_overlay
from .slurm_script import SlurmRequest, batch_script, frozen_options, limit_seconds

JOB = re.compile(r"\d{1,15}")
WARNING = 300  # seconds before Slurm's time limit
PATIENCE = 120.0  # seconds that sbatch has
EPILOG = """\
CONFIG and KEY=VALUE are those of megalite train. Nothing is started where they are wrong.
docs/clusters.md tells how to go from a laptop to a cluster, docs/launch.md what happens to a job there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = _parse(arguments)
    start: Callable[[argparse.Namespace], int] = args.start
    try:
        return start(args)
    except CheckFailed as failed:
        return failed.code


def _local(args: argparse.Namespace) -> int:
    """Become the supervisor of ranks on this machine."""
    megalite = find_megalite(args.megalite)
    checked = check(megalite, args.arguments, args.ranks)
    command = [sys.executable, str(PACKAGE), "supervise", "--backend", "local"]
    command += ["--run", str(checked.folder), "--ranks-per-node", str(checked.ranks)]
    frozen = _next(checked.folder / "launch", "config.yaml")
    command += frozen_options(frozen, megalite, args.arguments)
    command += ["--", megalite, "train", *(args.arguments if args.as_edited else [str(frozen)])]
    if args.dry_run:
        print(shlex.join(command))
        return DONE
    run = RunFolder(checked.folder)
    run.check()
    with submitting(run):
        _write(frozen, resolved(megalite, args.arguments))
    _tell(checked, None)
    sys.stdout.flush()
    # This process becomes the supervisor, so that signals meet it. They wait until it can hear them.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    return os.execv(command[0], command)


def _slurm(args: argparse.Namespace) -> int:
    if args.min_nodes is not None and args.min_nodes > args.nodes:
        raise UserError(f"--min-nodes {args.min_nodes}: must be at most --nodes {args.nodes}, which it stands in for")
    load_thresholds(None if args.thresholds is None else Path(args.thresholds))
    _check_time(args.time, args.warning)
    checked = _checked(args)
    run = RunFolder(checked.folder)
    options = dict(_setting(text) for text in args.sbatch)
    for name in ("time", "partition", "account", "qos", "cpus_per_task", "mem"):
        if getattr(args, name) is not None:
            options[name.replace("_", "-")] = str(getattr(args, name))
    if not args.cpus_only:
        options.setdefault("gpus-per-node", str(args.gpus_per_node))
    srun = list(args.srun)
    if args.container is not None:
        srun += [f"--container-image={args.container}"]
        srun += [f"--container-mounts={args.mounts}"] if args.mounts is not None else []
    script = _next(run.path / "launch", "sbatch")
    megalite = args.megalite or ("megalite" if args.container or args.unchecked else find_megalite(None))
    job = SlurmRequest(
        run=run.path,
        name=re.sub(r"[^A-Za-z0-9_.-]", "_", run.path.name),
        nodes=args.nodes,
        spares=args.spares,
        least_nodes=args.min_nodes or args.nodes,
        ranks=args.gpus_per_node,
        warning=args.warning,
        options=options,
        srun=srun,
        preflight=args.preflight,
        thresholds=None if args.thresholds is None else os.path.abspath(args.thresholds),
        gpus=0 if args.cpus_only else args.gpus_per_node,
        trainer=args.trainer,
        python=args.python,
        megalite=megalite,
        arguments=args.arguments,
        folder=os.getcwd(),
        frozen=None if args.unchecked else script.with_suffix(".config.yaml"),
        as_edited=args.as_edited,
    )
    text = batch_script(job)
    if args.dry_run:
        print(text, end="")
        return DONE
    run.check()
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: is not on the PATH; run this on a login node of a Slurm cluster, or use --dry-run")
    with submitting(run):
        _refuse_a_second(run)
        (run.path / "logs").mkdir(parents=True, exist_ok=True)
        if job.frozen is not None:
            _write(job.frozen, resolved(find_megalite(args.megalite), args.arguments))
        submitted = _submit(_write(script, text))
        say = f"submitted {script} as job {submitted}"
        append_event(run.events, "submitted", "launcher", say, job=submitted, script=str(script))
    _tell(checked, script)
    print(f"job      {submitted}: squeue --job {submitted}")
    print(f"save     scancel --batch --signal=USR1 {submitted}   saves and goes on later")
    print(f"end      scancel {submitted}   saves and ends")
    return DONE


def _kubernetes(args: argparse.Namespace) -> int:
    checked = _checked(args)
    pods = pods_of(args, checked.folder)
    text = manifest(pods, [document for path in args.overlay for document in read_overlay(Path(path))])
    print(text, end="", flush=True)
    if args.dry_run:
        return DONE
    RunFolder(checked.folder).check()
    kubectl = _kubectl(pods) if args.submit else None
    script = _write(_next(checked.folder / "launch", "yaml"), text)
    print()
    if kubectl is not None:
        done = subprocess.run([kubectl, "apply", "-f", str(script)], stdin=subprocess.DEVNULL, timeout=PATIENCE)
        if done.returncode:
            raise UserError(f"kubectl apply -f {script}: ended with {done.returncode}; it has told why")
        say = f"applied {script} as job {pods.name}"
        append_event(RunFolder(checked.folder).events, "submitted", "launcher", say, job=pods.name, script=str(script))
    _tell(checked, script)
    file, place = shlex.quote(str(script)), "" if pods.namespace is None else f" --namespace {pods.namespace}"
    if kubectl is None:
        print(f"start    kubectl apply -f {file}   or this command with --submit: nothing was started yet")
    print(f"pods     kubectl get pods --selector app={pods.name}{place}")
    print(f"output   kubectl logs --follow job/{pods.name}{place}")
    print(f"end      kubectl delete --filename {file}   saves and ends")
    return DONE


def _checked(args: argparse.Namespace) -> CheckedRun:
    """Return the run that would start on a cluster, after a check unless the check is left to the job."""
    ranks = args.nodes * args.gpus_per_node
    if args.unchecked is not None:
        return CheckedRun(ranks, f"{ranks} ranks, not checked here", Path(args.unchecked).absolute(), "as configured")
    return check(find_megalite(args.megalite), args.arguments, ranks)


def _check_time(limit: str | None, warning: int) -> None:
    """Raises UserError if Slurm would ask the ranks to save as soon as the job starts."""
    seconds = None if limit is None else limit_seconds(limit)
    if seconds is not None and seconds <= warning:
        raise UserError(
            f"--time {limit}: is {seconds} s, and the ranks are asked to save and stop {warning} s before that; "
            "give more time, or less with --warning SECONDS"
        )


def _refuse_a_second(run: RunFolder) -> None:
    """Raises UserError if the latest job that was submitted for the run has not ended, or a supervisor is at work."""
    events = read_events(run.events)
    if rival := local_rival(run, events):
        raise UserError(f"{run.path}: {rival} is at work in this run folder; stop that one first")
    jobs = [event.get("job") for event in events if event["event"] == "submitted"]
    squeue = shutil.which("squeue")
    if not jobs or squeue is None or not JOB.fullmatch(str(jobs[-1])):
        return
    command = [squeue, "--noheader", "--jobs", str(jobs[-1]), "--format", "%T"]
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return  # the lock of the run folder keeps a second job out all the same
    if asked.returncode == 0 and (state := asked.stdout.strip()):
        raise UserError(
            f"{run.path}: job {jobs[-1]} of this run is {state}; it goes on by itself. "
            f"End it with scancel {jobs[-1]} first, or give run.name another name"
        )


def _kubectl(pods: Pods) -> str:
    """The command. Raises UserError if there is a job of this name: `apply` would leave it, even if it is over."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UserError("kubectl: is not on the PATH; without --submit a file is written that it can apply elsewhere")
    place = [] if pods.namespace is None else ["--namespace", pods.namespace]
    command = [kubectl, "get", "job", pods.name, "--ignore-not-found", "--output=name", *place]
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    if asked.returncode:
        raise UserError(f"kubectl get job {pods.name}: ended with {asked.returncode}; it has told why")
    if asked.stdout.strip():
        delete = shlex.join(["kubectl", "delete", "job", pods.name, *place])
        raise UserError(
            f"--name {pods.name}: there is a job of this name. One that is not over goes on by itself; "
            f"one that is over is removed with: {delete}"
        )
    return kubectl


def _submit(script: Path) -> str:
    """The id of the job that Slurm has made of a script. Raises UserError if it has refused."""
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch {script}: has not answered for {PATIENCE:g} s; see squeue --me") from None
    if done.returncode:
        raise UserError(f"sbatch {script}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    job = done.stdout.strip().partition(";")[0]
    if not JOB.fullmatch(job):
        raise UserError(
            f"sbatch {script}: has answered {done.stdout[:100]!r}, which is no id of a job; see squeue --me"
        )
    return job


def _next(folder: Path, end: str) -> Path:
    """The path of the next numbered file in a folder; no other file there has its number."""
    try:
        taken = {path.name.partition(".")[0] for path in folder.iterdir()}
    except OSError:
        taken = set()
    return folder / next(f"{number:03d}.{end}" for number in itertools.count(1) if f"{number:03d}" not in taken)


def _write(path: Path, text: str) -> Path:
    """Write a new file into a folder, which is made. Raises UserError if there is such a file by now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, text, give_name=give_new_name)
    except FileExistsError:
        raise UserError(
            f"{path}: was written by another start of this run meanwhile; look at it, then try again"
        ) from None
    return path


def _tell(checked: CheckedRun, script: Path | None) -> None:
    folder = shlex.quote(str(checked.folder))
    print(f"run      {folder}: {checked.layout}, steps {checked.steps}")
    if script is not None:
        print(f"script   {shlex.quote(str(script))}")
    print(f"watch    megalite-status {folder} --follow")
    print(f"errors   megalite-logs {folder}")


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else list(arguments)
    top = argparse.ArgumentParser(
        "megalite-launch", description="Start a run, and have it looked after.", epilog=EPILOG
    )
    top.add_argument(
        "where", choices=tuple(WAYS), metavar="WHERE", help="; ".join(f"{way}: {WAYS[way][1]}" for way in WAYS)
    )
    where = top.parse_args(words[:1]).where
    start, summary, add_options = WAYS[where]
    parser = argparse.ArgumentParser(f"megalite-launch {where}", description=f"Start a run {summary}.", epilog=EPILOG)
    parser.set_defaults(start=start)
    parser.add_argument("arguments", nargs="+", metavar="CONFIG | KEY=VALUE", help="as for megalite train")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, write and start nothing")
    parser.add_argument(
        "--megalite", metavar="PATH", help="the megalite command (default: beside this Python, or PATH)"
    )
    add_options(parser)
    return parser.parse_intermixed_args(words[1:])  # overrides may come after options


def _local_options(local: argparse.ArgumentParser) -> None:
    _edited_option(local)
    local.add_argument("--ranks", type=count, metavar="R", help="number of ranks (default: as the layout says)")


def _edited_option(way: argparse.ArgumentParser) -> None:
    way.add_argument(
        "--as-edited",
        action="store_true",
        help="let every attempt read the configuration's files anew (default: all use them as they are now)",
    )


def _slurm_options(slurm: argparse.ArgumentParser) -> None:
    cluster_options(slurm)
    _edited_option(slurm)
    slurm.add_argument("--spares", type=natural, default=0, metavar="K", help="further nodes, to replace bad ones")
    slurm.add_argument("--min-nodes", type=count, metavar="M", help="train on fewer, down to M (default: --nodes)")
    for name, word in (("time", "LIMIT"), ("partition", "NAME"), ("account", "NAME"), ("qos", "NAME")):
        slurm.add_argument(f"--{name}", metavar=word, help="as of sbatch")
    slurm.add_argument("--cpus-per-task", type=count, metavar="C", help="cores of a rank (default: 8 beside a GPU)")
    slurm.add_argument("--mem", metavar="SIZE", help="memory of a node, as of sbatch (default: 0, all of it)")
    slurm.add_argument("--container", metavar="IMAGE", help="run the ranks in it (pyxis: --container-image of srun)")
    slurm.add_argument("--mounts", metavar="A:B,…", help="with --container: folders it sees (--container-mounts)")
    slurm.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option; repeatable. --sbatch oversubscribe: do not ask for whole nodes (--exclusive)",
    )
    slurm.add_argument("--srun", action="append", default=[], metavar="OPTION", help="another, as --srun=--mpi=none")
    slurm.add_argument("--preflight", choices=("off", "light", "full"), default="light", help="default: light")
    slurm.add_argument(
        "--trainer",
        default="python3" if not Path(sys.executable).with_name("megalite").exists() else sys.executable,
        metavar="PATH",
        help="the Python that has megalite, for what preflight measures",
    )
    slurm.add_argument("--thresholds", metavar="FILE", help="limits of preflight, in place of ours (docs/preflight.md)")
    slurm.add_argument("--python", default=sys.executable, metavar="PATH", help="3.9 or newer, for the supervisor")
    slurm.add_argument(
        "--warning",
        type=count,
        default=WARNING,
        metavar="S",
        help=f"seconds to save in at the limit ({WARNING})",
    )


WAYS: dict[str, tuple[Callable[..., int], str, Callable[[argparse.ArgumentParser], None]]] = {
    "local": (_local, "on this machine, and again after a crash or hang", _local_options),
    "slurm": (_slurm, "by Slurm, in one job that survives the loss of nodes", _slurm_options),
    "kubernetes": (_kubernetes, "on Kubernetes, as an Indexed Job", kubernetes_options),
}
