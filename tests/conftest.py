"""Fixtures shared by all tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads on tensors this small only wait for each other
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else a process of its own, which imports PyTorch first
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; `make gpu` sets 0

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; tests interrupt what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if gc.isenabled():  # until tests are collected: it would look at all packages and tests over and over
    gc.disable()

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from ranks import Ranks
from wheel_install import install

from megalite.base.stop_signals import STOP_SIGNALS, restore
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.plan.memory import states

# Files that take half a minute or more, the longest first.
LONGEST = (
    "parallel/test_experts_apart.py",
    "dry_run/test_dryrun.py",
    "checkpoint/test_checkpoint_layouts.py",
    "experiment/test_real_ladder.py",
    "test_layouts.py",
    "soak/test_soak.py",
    "dry_run/test_dryrun_adapters.py",
    "tools/bench/training/test_training_implementations.py",
    "test_readme.py",
    "tools/bench/test_bench_ranks.py",
    "test_library_example.py",
    "parallel/test_experts_layouts.py",
    "parallel/test_copies.py",
    "parallel/test_gpt_oss_layouts.py",
    "parallel/test_float8.py",
    "parallel/test_latent_layouts.py",
    "train/test_train_elastic.py",
    "train/test_train_stop_phases.py",
    "train/test_train_signals.py",
    "optim/test_optim_muon_ranks.py",
    "commands/test_verify.py",
    "parallel/test_parallel_adapters.py",
    "train/test_train_build.py",
    "train/test_train_outcome.py",
    "inference/test_inference_layouts.py",
    "experiment/test_sweep_command.py",
    "scaling/test_scaling_command.py",
    "train/test_train_loop.py",
    "optim/test_optim_files.py",
    "checkpoint/test_checkpoint_tier.py",
    "train/test_train_guard.py",
    "tools/experiment/test_tools_coordinate_check.py",
    "soak/test_sweep_kills.py",
    "cuda/test_fake_cuda.py",
    "train/test_train_stop.py",
    "distributed/test_local.py",
    "distributed/test_watchdog.py",
    "parallel/test_recompute.py",
    "kernels/test_kernels_compile.py",
    "train/test_train_command.py",
    "train/test_train_stragglers.py",
    "checkpoint/test_checkpoint_damage.py",
    "parallel/test_modes.py",
    "layout_search/test_search.py",
    "distributed/test_start.py",
)

# Folders and files that `make test-fast` leaves out, as it does all tests that use the eight ranks.
SLOW = (
    "checkpoint/",
    "commands/",
    "cuda/",
    "experiment/",
    "gpu/",
    "inference/",
    "kernels/",
    "launch/",
    "soak/",
    "tools/",
    "train/",
)
SLOW += (
    "test_layouts.py",
    "test_library_example.py",
    "test_readme.py",
    "dry_run/test_dryrun",
    "layout_search/test_search.py",
)
SLOW += tuple(f"distributed/test_{name}.py" for name in ("local", "start", "watchdog"))
SLURM = tuple(f"launch/test_{name}slurm.py" for name in ("", "disk_full_", "preparation_", "supervisor_", "sweep_"))

PRIORITY = os.getpriority(os.PRIO_PROCESS, 0)

settings.register_profile("megalite", deadline=None, max_examples=50)
settings.load_profile("megalite")


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Give every test the handlers that the one before had: commands that run in this process set their own."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    restore(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight gloo ranks, shared by the whole session."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed."""
    return install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def older_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is predicted for PyTorch 2.14, whatever is installed: documents and presets have its figures."""
    monkeypatch.setattr(states, "_pytorch", lambda: (2, 14))


@pytest.fixture(scope="module")
def alone() -> Iterator[Mesh]:
    """The mesh of one rank, in the test's own process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    yield mesh
    dist.destroy_process_group()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give Slurm's tests the cores first, as its daemons take a node that answers late for a dead one.

    All others, and what they start, are batch jobs to Linux: a thread that wakes up lets the one go on that woke it.
    Else ranks that send would lose their core while they hold gloo's lock, and threads that receive would spin for it.
    """
    slurm = item.get_closest_marker("slurm") is not None
    with suppress(PermissionError):  # only root may go back, as only root runs Slurm's tests
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY if slurm else PRIORITY + 5)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_OTHER if slurm else os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_finish() -> None:
    """Turn the garbage collector on, but leave it nothing of what has been imported, nor the tests themselves.

    It would look at those many objects in every run that a test trains, several times.
    """
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their place, and let the longest come first, so that no worker is left with one at the end."""
    here = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(here)
        if path.as_posix().startswith(SLOW) or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        if path.as_posix() in SLURM:
            item.add_marker("slurm")
            item.add_marker(pytest.mark.timeout(1800))  # a busy machine may be slow, and nobody waits where it works
        if path.parts[0] == "soak":
            item.add_marker("soak")
    turn = {here / name: number for number, name in enumerate(LONGEST)}
    assert [str(path) for path in turn if not path.exists()] == []
    items.sort(key=lambda item: turn.get(item.path, len(turn)))
