"""Finds out whether the process of the next rank still exists, however busy it is.

Every rank has a socket that listens, and now and then connects to that of the next rank. The kernel of the other host
answers, not the process. So a process counts as alive while it is busy, or waits for a file system with all of its
threads. If it has ended, the connection is refused; a lost host does not answer. The collectives of NCCL do not tell
any of this: they wait.
"""

import os
import socket
import time
from contextlib import suppress

import torch.distributed as dist

from megalite.dist.ranks import RankInfo

EVERY = 10.0  # seconds between two looks
ANSWER = 2.0  # seconds that a host has to answer
REFUSALS = 2  # in a row, after which a process counts as ended: it may just have ended well
SILENCES = 6  # looks in a row, after which a host counts as lost
BACKLOG = 128  # looks that the kernel answers while the process does not hear of them


class Neighbour:
    """The next rank of the job, as the rank before it sees it."""

    def __init__(self, store: dist.Store, rank_info: RankInfo) -> None:
        self.rank, self._store = (rank_info.rank + 1) % rank_info.world_size, store
        self._refused = self._silent = 0
        self._seen = False
        self._due = 0.0
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
                self._listener.accept()[0].close()
        if time.monotonic() >= self._due and self._store.check([f"listens {self.rank}"]):
            self._due = time.monotonic() + EVERY
            self._look()
        if self._refused >= REFUSALS:
            return f"the process of rank {self.rank} has ended"
        if self._silent >= SILENCES:
            return f"the host of rank {self.rank} has not answered for {SILENCES * EVERY:g} s"
        return ""

    def forgive(self) -> None:
        """Count anew: the next rank has turned out to be alive."""
        self._refused = self._silent = 0
        self._seen = False

    def _look(self) -> None:
        port, _, host = self._store.get(f"listens {self.rank}").decode().partition(" ")
        try:
            socket.create_connection((host, int(port)), ANSWER).close()
        except ConnectionRefusedError:
            self._refused += self._seen
        except OSError:
            self._silent += self._seen
        else:
            self._refused = self._silent = 0
            self._seen = True


def _address_towards(host: str) -> tuple[str, socket.AddressFamily]:
    """The address from which this machine would reach `host`, and its family; nothing is sent."""
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(there)
        return route.getsockname()[0], family
