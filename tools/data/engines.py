"""Engines that do the tasks of a preparation: processes of this machine, Ray, or a job array of Slurm.

A task is done once, whoever does it: an engine only starts lost ones again.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Literal

from megalite.base.errors import InputError
from megalite.base.files import write_whole
from megalite_launch.base.errors import UserError
from megalite_launch.base.slurm import Call, call
from megalite_launch.submit.slurm_array import Array, array_script, submitted
from megalite_tools.data.encode import start_worker, submit
from megalite_tools.data.shard_task import Record, ShardTask, make_shard

try:
    import ray

    HAS_RAY = True
except ImportError:  # optional: pip install megalite[ray]
    HAS_RAY = False

Engine = Literal["local", "ray", "slurm"]
ENGINES: tuple[Engine, ...] = ("local", "ray", "slurm")
MAX_LOSSES = 3  # losses of workers without a shard finished in between
WARNING_SECONDS = 60  # before the time limit of a job, at which a task ends
LOST = "workers died {losses} times, perhaps for want of memory; finished shards are kept: the same command goes on"
PROGRAM = "from megalite_tools.commands import prepare_data; raise SystemExit(prepare_data())"


def attempt(task: ShardTask) -> Record | str:
    """Make a shard with one core. Returns its record, or the message on what is wrong with its input."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return make_shard(task)
    except InputError as error:
        return str(error)


def run_local(tasks: Sequence[ShardTask], workers: int) -> Iterator[tuple[ShardTask, Record]]:
    """Do the tasks in processes of this machine; yields each when done. Raises InputError for the first that fails.

    Processes that die are started again, `MAX_LOSSES` times in a row at the most.
    """
    if workers == 1:
        for task in tasks:
            yield task, _checked(attempt(task))
        return
    left, losses, others = list(tasks), 0, set(active_children())
    while left:
        pool = ProcessPoolExecutor(min(workers, len(left)), get_context("spawn"), initializer=start_worker)
        try:
            futures = {submit(pool, attempt, task): task for task in left}
            for future in as_completed(futures):
                record = _checked(future.result())
                left.remove(futures[future])
                losses = 0
                yield futures[future], record
        except BrokenProcessPool:
            losses += 1
            if losses == MAX_LOSSES:
                raise InputError(LOST.format(losses=losses)) from None
        except BaseException:  # nobody waits for shards that others are at
            for child in set(active_children()) - others:
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def run_ray(tasks: Sequence[ShardTask]) -> Iterator[tuple[ShardTask, Record]]:
    """Do the tasks in a Ray cluster, one core each, as `run_local` does.

    The cluster is that of RAY_ADDRESS, or one on this machine. Ray starts lost tasks again, on another node if need be.
    """
    if not HAS_RAY:
        raise InputError("--engine ray: needs the package `ray`: pip install 'megalite[ray]'")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"--engine ray: cannot reach the cluster: {error}; see RAY_ADDRESS") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=MAX_LOSSES)(attempt)
        futures = {remote.remote(task): task for task in tasks}
        try:
            while futures:
                (ready,), _ = ray.wait(list(futures), num_returns=1)
                yield futures.pop(ready), _checked(ray.get(ready))
        except ray.exceptions.RayError as error:
            raise InputError(f"--engine ray: {LOST.format(losses=MAX_LOSSES + 1)}: {str(error)[:300]}") from error
        finally:
            for future in futures:
                ray.cancel(future, force=True)
    finally:
        if ours:
            ray.shutdown()


def submit_slurm(
    out: str, tasks: int, options: dict[str, str], arguments: Sequence[str], ask: Call = call
) -> tuple[Path, str]:
    """Submit an array of `tasks` tasks, each the program with `arguments`. Returns the script and the job's id.

    Raises InputError for options that Slurm would not take, and if it refuses the script.
    """
    array = Array(
        name=Path(out).name,
        tasks=tasks,
        parallel=tasks,
        nodes=1,
        ranks=1,
        log=Path(f"{out}-slurm-%a.log").absolute(),
        warning=WARNING_SECONDS,
        options={"cpus-per-task": "1", **options},
        command=[sys.executable, "-c", PROGRAM, *arguments],
    )
    script = Path(f"{out}.sbatch")
    try:
        write_whole(script, array_script(array))
    except UserError as error:
        raise InputError(str(error)) from None
    job, why = submitted(script, ask)
    if why:
        raise InputError(f"sbatch {script}: {why}")
    return script, job


def _checked(result: Record | str) -> Record:
    if isinstance(result, str):
        raise InputError(result)
    return result
