"""Ranks as steps of the Slurm job in whose batch script the supervisor runs: one task per GPU, started by srun."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..base.events import Event
from ..base.files import kept, read_end
from ..base.own_command import own_command
from ..base.processes import SIGNAL_NAMES
from ..base.run_folder import RunFolder
from ..base.slurm import Slurm, SlurmJob
from ..base.verdict import srun_failed
from ..preflight.compare import compare_folder
from ..preflight.findings import sheet_path
from ..preflight.thresholds import load_thresholds
from . import other_supervisors
from .backend import Pause, Start, ask, environment
from .batch_host_guard import Heart

MAX_SRUNS = 64  # sruns at a time; with more nodes, one looks after several
REPEAT_SECONDS = 5.0  # seconds until ranks that have not ended are asked once more: they may not have been there
KILL_SECONDS = 3.0  # seconds that killed steps get to disappear; on a frozen node they never do
SRUN_END_SECONDS = 1.0  # seconds that an srun gets to end its step
GUARD = "megalite-guard"  # the name of the guard's step
TRIES = 20
PORTS = range(12000, 27000)  # below the range from which systems hand out ports
SIGNAL_BLOCK = ["env", f"--block-signal={SIGNAL_NAMES}"]
PLACEHOLDER = re.compile(r"\{(mode|attempt|nodes|port)\}")
SUSPENDED_STATES = ("SUSPENDED", "STOPPED")


@dataclass(frozen=True)
class Options:
    """Options for the start of ranks and checks."""

    ranks_per_node: int
    preflight: str = "off"  # or light, or full
    preflight_command: Sequence[str] = ()  # with {mode}, {attempt}, {nodes} and {port}
    preflight_seconds: float = 60.0
    thresholds: Path | None = None  # the site's own, by which nodes are compared
    srun: Sequence[str] = ()  # more options for the srun of the ranks, as for a container
    guard_seconds: float = 60.0
    patience: float = 600.0  # seconds with a Slurm that starts no checks
    master: str = ""  # host of rank 0; "": the first node


@dataclass
class SrunRanks:
    """The srun of the ranks, and the step behind it."""

    process: subprocess.Popen[bytes]
    slurm: Slurm
    log: Path
    left: bool = field(default=False, init=False)  # steps may be left: Slurm did not answer when they were killed
    _asked: float = field(default=-REPEAT_SECONDS)

    def poll(self) -> int | None:
        return self.process.poll()

    def ask_to_stop(self, number: int) -> None:
        """srun hands SIGUSR1 on. SIGTERM or SIGHUP would have it kill the ranks, and SIGINT only tell of them."""
        if time.monotonic() >= self._asked + REPEAT_SECONDS:
            self._asked = time.monotonic()
            ask(self.process, signal.SIGUSR1)

    def kill(self, pause: Pause) -> None:
        """Kill srun, then all steps but the guard: without their srun they would go on."""
        ask(self.process, signal.SIGKILL)
        deadline, told = time.monotonic() + KILL_SECONDS, set[str]()
        self.left = (steps := self.slurm.steps()) is None
        while left := {step for step, name in (steps or {}).items() if name != GUARD}:
            for step in left - told:
                self.slurm.kill(step)
            told |= left
            if time.monotonic() >= deadline:
                return
            pause(0.2)
            steps = self.slurm.steps()

    def said(self) -> list[str]:
        try:
            return read_end(self.log, 100_000).decode(errors="replace").splitlines()
        except OSError:
            return []


class SlurmBackend:
    """The job of this process's environment."""

    where = "slurm"

    def __init__(self, slurm: Slurm, restart: int, run: Path, options: Options, pause: Pause) -> None:
        self.slurm, self.job, self.restart = slurm, slurm.number, restart
        self.run, self.options, self.pause = run, options, pause
        self.beat = run / "attempts" / f"{self.job}.{restart}.beat"
        self.heart = Heart(self.beat)
        self._names: list[str] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_on = ""
        self._ranks: SrunRanks | None = None
        self._held: list[str] | None = None
        self._board = ""  # the port at which nodes that are checked find each other

    def rival(self, events: Sequence[Event]) -> str:
        if here := other_supervisors.local_rival(RunFolder(self.run), events):
            return here
        begun = [event for event in events if event["event"] == "begin" and event.get("cluster") == cluster()]
        other = str(begun[-1].get("job")) if begun else self.job
        if other == self.job or not other.isdigit():
            return ""
        job = self.slurm.job(other)
        return f"Slurm job {other}" if job and (job.runs or job.state in SUSPENDED_STATES) else ""

    def standing(self) -> SlurmJob | None:
        return self.slurm.job()

    def nodes(self, job: SlurmJob | None) -> list[str]:
        """Nodes of the job; if Slurm does not answer, those it had before. With --no-kill, they get fewer."""
        listed = job.nodes if job else ("" if self._names else os.environ.get("SLURM_JOB_NODELIST", ""))
        self._names = self.slurm.names(listed) or self._names
        return self._names

    def examine(self, nodes: Sequence[str], folder: Path, full: bool, stopped: Callable[[], bool]) -> dict[str, str]:
        """Run the preflight command on every node; where a group of nodes fails, on each of its nodes alone.

        Nodes that were drained are left alone.
        """
        unfit = self.slurm.unfit(nodes) if nodes else {}
        nodes = [node for node in nodes if node not in unfit]
        return {**self._all_examined(nodes, folder, full, stopped), **unfit}

    def _all_examined(
        self, nodes: Sequence[str], folder: Path, full: bool, stopped: Callable[[], bool]
    ) -> dict[str, str]:
        self._board = str(self._port(nodes[0], len(PORTS) // 2)) if nodes else ""
        size = -(-len(nodes) // MAX_SRUNS)
        groups = [tuple(nodes[first : first + size]) for first in range(0, len(nodes), size)] if nodes else []
        bad = self._examine(groups, folder, full, stopped, nodes)
        if size > 1:
            alone = [(node,) for group in bad for node in group]
            bad = {}
            for first in range(0, len(alone), MAX_SRUNS):
                bad.update(self._examine(alone[first : first + MAX_SRUNS], folder, full, stopped))
        found = {group[0]: why for group, why in bad.items()}
        return found if stopped() else {**self._compared(folder, nodes), **found}

    def _compared(self, folder: Path, nodes: Sequence[str]) -> dict[str, str]:
        """Compare nodes, if the check has left the files of megalite-preflight; return why each bad node is bad."""
        if not any(sheet_path(folder, node).exists() for node in nodes):
            return {}
        return dict(compare_folder(folder, load_thresholds(self.options.thresholds), nodes).bad)

    def start(self, start: Start, command: Sequence[str]) -> SrunRanks:
        log = start.logs / "srun.log"
        count = len(start.nodes)
        here = str(start.logs).replace("%", "%%")
        place = [f"--nodes={count}", f"--nodelist={','.join(start.nodes)}"]
        size = [f"--ntasks={count * self.options.ranks_per_node}", f"--ntasks-per-node={self.options.ranks_per_node}"]
        if (cores := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdigit():
            size.append(f"--cpus-per-task={cores}")  # srun does not inherit it from sbatch
        how = ["--overlap", "--export=ALL", "--kill-on-bad-exit=1", "--distribution=block", "--open-mode=append"]
        logs = [f"--output={here}/%N-%t.log"]
        master = self.options.master or start.nodes[0]
        more = {"MASTER_ADDR": master, "MASTER_PORT": str(self._port(master, start.number))}
        more["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or cores or "1"
        ranks = [*self._hold(), *command]
        with kept(log) as said:
            process = self._srun(
                [*how, *place, *size, *logs, *self.options.srun, *ranks], said, environment(start, more)
            )
        self._ranks = SrunRanks(process, self.slurm, log)
        return self._ranks

    def requeue(self) -> str:
        return self.slurm.requeue()

    def begin(self) -> None:
        """Start the guard, or start it anew if it is gone. On one node there is nothing for it to do.

        Before, end what may be left of ranks.
        """
        if self._ranks is not None and self._ranks.left:
            self._ranks.kill(self.pause)
        self.heart.start()
        if len(self._names) < 2 or (self._guard and self._guard.poll() is None and self._guard_on in self._names):
            return
        self._guard_on = self._names[-1]
        times = ["--restart", str(self.restart), "--seconds", str(self.options.guard_seconds)]
        words = ["--run", str(self.run), "--beat", str(self.beat), "--job", self.job, *times]
        command = own_command("supervise.batch_host_guard", *words)
        with kept(self.beat.with_suffix(".guard.log")) as said:
            options = [f"--job-name={GUARD}", "--overlap", "--quiet", *_on([self._guard_on])]
            self._guard = self._srun([*options, *command], said)

    def end(self) -> None:
        """End the sign of life and the guard.

        The guard gets SIGKILL if SIGTERM does not end it soon: an srun whose step was never launched, as in a job that
        is just cancelled, hangs on SIGTERM for a minute.
        """
        self.heart.stop()
        if self._guard is not None:
            _end([self._guard], self.pause)

    def _hold(self) -> list[str]:
        """Words of a command that holds back signals until a rank can hear them; empty before GNU coreutils 8.31."""
        if self._held is None:
            try:
                works = (
                    subprocess.run([*SIGNAL_BLOCK, "true"], capture_output=True, timeout=30, check=False).returncode
                    == 0
                )
            except (OSError, subprocess.TimeoutExpired):
                works = False
            self._held = SIGNAL_BLOCK if works else []
        return self._held

    def _port(self, host: str, number: int) -> int:
        """Choose a port at which nobody listens, another one for every attempt: the one before may still be in use."""
        first = int(self.job.partition("_")[0]) * 31 + self.restart * 7 + number
        for more in range(TRIES):
            port = PORTS[(first + more) % len(PORTS)]
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                break
        return port

    def _examine(
        self,
        groups: Sequence[tuple[str, ...]],
        folder: Path,
        full: bool,
        stopped: Callable[[], bool],
        together: Sequence[str] = (),
    ) -> dict[tuple[str, ...], str]:
        """Groups of nodes on which the check has failed, and why. together: nodes that check each other as well.

        Where srun itself fails, as while Slurm's controller restarts, the check is made again after a pause.
        """
        bad: dict[tuple[str, ...], str] = {}
        left, wait, began = list(groups), 1.0, time.monotonic()
        while left:
            found = self._examine_once(left, folder, full, stopped, together)
            left = [group for group in found if srun_failed(_lines(_log(folder, group)))]
            bad.update(found)
            if time.monotonic() - began >= self.options.patience or stopped():
                break
            for group in left:
                del bad[group]
            until = time.monotonic() + (wait if left else 0)
            while time.monotonic() < until and not stopped():
                self.pause(0.1)
            wait = min(2 * wait, 30.0)
        return bad

    def _examine_once(
        self,
        groups: Sequence[tuple[str, ...]],
        folder: Path,
        full: bool,
        stopped: Callable[[], bool],
        together: Sequence[str],
    ) -> dict[tuple[str, ...], str]:
        under_way: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}
        bad: dict[tuple[str, ...], str] = {}
        for group in groups:
            with suppress(OSError):
                _log(folder, group).unlink()  # the output of an earlier check tells nothing of this one
            with kept(_log(folder, group)) as said:
                check = self._check(folder, full, together or group)
                under_way[group] = self._srun(["--overlap", "--quiet", *_on(group), *check], said)
        deadline = time.monotonic() + self.options.preflight_seconds
        while under_way and time.monotonic() < deadline and not stopped():
            for group, process in list(under_way.items()):
                if process.poll() is not None:
                    del under_way[group]
                    if process.returncode:
                        bad[group] = _last_line(_log(folder, group)) or f"the check ended with {process.returncode}"
            self.pause(0.02)
        bad.update((group, f"gave no answer within {self.options.preflight_seconds:.0f} s") for group in under_way)
        _end(list(under_way.values()), self.pause)
        return bad

    def _check(self, folder: Path, full: bool, together: Sequence[str]) -> list[str]:
        if self.options.preflight == "off" or not self.options.preflight_command:
            return ["true"]  # whether the node answers
        mode = "full" if full and self.options.preflight == "full" else "light"
        filled = {"{mode}": mode, "{attempt}": str(folder), "{nodes}": ",".join(together), "{port}": self._board}
        return [PLACEHOLDER.sub(lambda place: filled[place[0]], word) for word in self.options.preflight_command]

    def _srun(
        self, arguments: Sequence[str], said: IO[bytes] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start srun in a session of its own, so that a signal to the batch script's group does not end ranks."""
        return subprocess.Popen(
            ["srun", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def cluster() -> str:
    return os.environ.get("SLURM_CLUSTER_NAME", "")


def _end(sruns: Sequence[subprocess.Popen[bytes]], pause: Pause) -> None:
    """Have sruns kill their steps; kill those that have not ended after a moment."""
    for number, patience in ((signal.SIGTERM, SRUN_END_SECONDS), (signal.SIGKILL, 60.0)):
        for process in sruns:
            ask(process, number)
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in sruns) and time.monotonic() < deadline:
            pause(0.02)


def _on(nodes: Sequence[str]) -> list[str]:
    """Options of srun for one task on each of these nodes."""
    count = len(nodes)
    return [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"]


def _log(folder: Path, group: Sequence[str]) -> Path:
    return folder / f"preflight-{group[0]}.log"


def _lines(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    with suppress(OSError):
        lines = (line.strip() for line in read_end(log, 20_000).decode(errors="replace").splitlines())
        return [line for line in lines if line]
    return []


def _last_line(log: Path) -> str:
    lines = _lines(log)
    told = [line for line in lines if not line.startswith("srun: ")] or lines
    return told[-1][:300] if told else ""
