"""Fixtures shared by all tests."""

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads on tensors this small only wait for each other
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; `make gpu` sets 0

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; tests interrupt what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from hypothesis import settings
from ranks import Ranks

settings.register_profile("megalite", deadline=None, max_examples=50)
settings.load_profile("megalite")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Eight gloo ranks, shared by the whole session."""
    pool = Ranks()
    yield pool
    pool.stop()
