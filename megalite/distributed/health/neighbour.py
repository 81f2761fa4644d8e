"""Finds out whether the process of the next rank still exists, however busy it is.

Every rank has a socket that listens, and now and then connects to that of the next rank. The kernel of the other host
answers, not the process. So a process counts as alive while it is busy, or waits for a file system with all of its
threads. When it ends, the kernel closes the latest connection, and further ones are refused; a lost host does not
answer. The collectives of NCCL do not tell any of this: they wait.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist

from megalite.distributed.start.ranks import RankInfo

LOOK_INTERVAL = 10.0  # seconds between two looks
RETRY_INTERVAL = 0.5  # seconds until the next look, if the latest connection was closed or refused
ANSWER_TIMEOUT = 2.0  # seconds that a host has to answer
MAX_REFUSALS = 2  # in a row, after which a process counts as ended: it may just have ended well
MAX_SILENCES = 6  # looks in a row, after which a host counts as lost
BACKLOG = 128  # looks that the kernel answers while the process does not hear of them


class Neighbour:
    """The next rank of the job, as the rank before it sees it."""

    def __init__(self, store: dist.Store, rank_info: RankInfo) -> None:
        self.rank, self._store = (rank_info.rank + 1) % rank_info.world_size, store
        self._refused = self._silent = 0
        self._seen = False
        self._due = 0.0
        self._line: socket.socket | None = None  # to the next rank: the latest connection
        self._heard: deque[socket.socket] = deque(maxlen=2)  # kept open, as the rank before this one sees them closed
        here, family = _address_towards(os.environ["MASTER_ADDR"])
        self._listener = socket.create_server((here, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        store.set(f"listens {rank_info.rank}", f"{self._listener.getsockname()[1]} {here}")

    def lost(self) -> str:
        """Look at the next rank, if it is time. Returns what was wrong with it in the latest looks, or nothing.

        Only a rank that was reached before counts as lost: its address may be one that other hosts cannot use.
        """
        with suppress(OSError):  # as soon as nobody is left to be heard
            while True:
                self._heard.append(self._listener.accept()[0])
        if self._line is not None and _closed(self._line):
            self._line, self._due = None, 0.0
        if time.monotonic() >= self._due and self._store.check([f"listens {self.rank}"]):
            self._due = time.monotonic() + LOOK_INTERVAL
            self._look()
        if self._refused >= MAX_REFUSALS:
            return f"the process of rank {self.rank} has ended"
        if self._silent >= MAX_SILENCES:
            return f"the host of rank {self.rank} has not answered for {MAX_SILENCES * LOOK_INTERVAL:g} s"
        return ""

    def forgive(self) -> None:
        """Count anew: the next rank has turned out to be alive."""
        self._refused = self._silent = 0
        self._seen = False

    def _look(self) -> None:
        try:
            self._line = _connect(self._store, self.rank)
            self._line.setblocking(False)
        except ConnectionRefusedError:
            self._refused += self._seen
            self._due = time.monotonic() + min(RETRY_INTERVAL, LOOK_INTERVAL)
        except OSError:
            self._silent += self._seen
        else:
            self._refused = self._silent = 0
            self._seen = True


def all_ended(store: dist.Store, ranks: Iterable[int]) -> bool:
    """Return whether the processes of all these ranks have ended, as their hosts say."""
    for rank in ranks:
        if not store.check([f"listens {rank}"]):
            return False
        try:
            _connect(store, rank).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return True


def _connect(store: dist.Store, rank: int) -> socket.socket:
    """Connect to a rank. Raises OSError: ConnectionRefusedError if the process has ended."""
    port, _, host = store.get(f"listens {rank}").decode().partition(" ")
    return socket.create_connection((host, int(port)), ANSWER_TIMEOUT)


def _closed(line: socket.socket) -> bool:
    """Return whether the other end of a connection, over which nothing is sent, is gone."""
    try:
        return not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _address_towards(host: str) -> tuple[str, socket.AddressFamily]:
    """The address from which this machine would reach `host`, and its family; nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(there)
        return route.getsockname()[0], family
