"""A Slurm cluster of two nodes on this one machine, made of the real daemons, for tests of the batch script."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
DAEMONS = ("munged", "slurmctld", "slurmd")
PATIENCE = 600.0  # seconds in which anything must happen that is waited for: a busy machine takes minutes for seconds
LOOKS = (0.1, 0.5)  # seconds between two looks, at first and in the end: each of them is a command of Slurm or more
SYSTEM = "/usr/sbin:/sbin"  # where daemons lie
NODES = ("127.0.0.1", "127.0.0.2")  # names by which the ranks of one machine can find each other
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=3600
UnkillableStepTimeout=600
SlurmdTimeout=10
ReturnToService=2
SchedulerParameters=sched_interval=2,sched_min_interval=0
FirstJobId={ports[0]}
NodeName=127.0.0.[1-2] NodeHostname={host} Port=[{ports[1]},{ports[2]}] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=15 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM}") is None]
    if absent:
        return f"needs {' and '.join(absent)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmd must run as root"


class Cluster:
    """Two nodes of 16 pretended cores each; a context manager that leaves no process behind.

    more: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], more: str = "") -> None:
        self.folder, self._more = folder, more
        path = f"{environment['PATH']}:{SYSTEM}"
        self.environment = {**environment, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}  # by name; slurmd's by node

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def run(self, *command: str, check: bool = True, folder: Path | None = None) -> str:
        """What a command of Slurm prints, or one that calls Slurm."""
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}{self._logs()}")
        return done.stdout.strip()

    def wait(self, job: str, timeout: float = PATIENCE) -> dict[str, str]:
        """The properties of a job once it has ended."""
        self.until(lambda: self.job(job)["JobState"] not in UNFINISHED, f"job {job} at its end", timeout)
        return self.job(job)

    def until(self, done: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        """Wait for something; raises TimeoutError with the daemons' messages."""
        deadline, (pause, longest) = time.monotonic() + timeout, LOOKS
        while not done():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons.values()):
                nodes = self.run("sinfo", "-h", "-N", "-o", "%N %T %E", check=False)
                raise TimeoutError(f"never saw {what}; nodes: {nodes}{self._logs()}")
            time.sleep(pause)
            pause = min(1.2 * pause, longest)

    def idle(self) -> bool:
        """Whether both nodes are there and have nothing to do."""
        return self.run("sinfo", "-h", "-o", "%T %D", check=False) == f"idle {len(NODES)}"

    def job(self, job: str) -> dict[str, str]:
        """The properties of a job, such as JobState and ExitCode."""
        pairs = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def processes(self, **variables: str) -> list[int]:
        """Processes of this cluster, daemons and jobs, that were started with these environment variables."""
        variables["SLURM_CONF"] = self.environment["SLURM_CONF"]
        marks = {f"{name}={value}" for name, value in variables.items()}
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in entries if marks <= _environment(entry)]

    def freeze(self, node: str) -> list[int]:
        """Stop all processes of a node: its slurmd, what that has started, and their srun. Returns their ids."""
        slurmd = self._daemons[node].pid
        os.kill(slurmd, signal.SIGSTOP)  # before it can start or notice anything
        found: set[int] = set()
        while new := self._of_node(node) - found:
            for process in new:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            found |= new
        return [slurmd, *found]

    def thaw(self, processes: list[int]) -> None:
        for process in reversed(processes):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def crash(self, node: str) -> None:
        """Have a node lose its power. Frozen first, none of its processes can tell of the death of another."""
        processes = self.freeze(node)
        self._daemons.pop(node)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def revive(self, node: str) -> None:
        """Switch a node on again that has crashed."""
        self._daemon(node, "slurmd", "-D", "-N", node)

    def stop_controller(self) -> None:
        """Have Slurm's controller go away, as for an upgrade."""
        controller = self._daemons.pop("slurmctld")
        controller.terminate()
        controller.wait(PATIENCE)

    def start_controller(self) -> None:
        """Have it come back, with the state that it has left."""
        self._daemon("slurmctld", "slurmctld", "-D")

    def _of_node(self, node: str) -> set[int]:
        """Processes of jobs on a node, and the daemons of their steps."""
        jobs = set(self.processes(SLURMD_NODENAME=node))
        return jobs | ({_parent(process) for process in jobs} & set(self.processes()))

    def _start(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        text = CONFIGURATION.format(host=socket.gethostname().partition(".")[0], folder=self.folder, ports=_ports(3))
        (self.folder / "slurm.conf").write_text(f"{text}{self._more}\n")
        munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in munge.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *files)  # force: the folder lies in a temporary one
        self.until((self.folder / "munge.socket").exists, "the socket of munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self._daemon(node, "slurmd", "-D", "-N", node)
        self.until(self.idle, "two idle nodes")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._daemons[name] = daemon

    def _stop(self) -> None:
        """Kill the daemons and all that they have started."""
        while ours := self.processes():
            for process in ours:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for daemon in self._daemons.values():
                daemon.poll()
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n" + (self.folder / "daemons.log").read_text(errors="replace")[-4000:]


def _environment(process: Path) -> set[str]:
    """What a process, a folder of /proc, was started with; empty once it has ended."""
    try:
        return set((process / "environ").read_text(errors="replace").split("\0"))
    except OSError:
        return set()


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return sorted(each.getsockname()[1] for each in sockets)
