"""Trackers of other programs, served by a thread each, so that their network, disk and server do not delay training."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object, write_object
from megalite.base.output import Outlet
from megalite.config.schema import Config
from megalite.train.tracking.tracker import Tracker

MAX_REPORTS = 10_000  # reports that wait to be sent
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # id of a tracked run, which a file of the run folder keeps


class Service(Tracker):
    """A tracked run of another program. When the run in `folder` goes on, its tracked run is the same one.

    Made and called by one thread, which may wait for a server. Whatever it raises is told once.
    """

    name: str  # the program, in messages
    remedy = ""  # end of the message that not everything was sent in time

    def __init__(self, folder: Path, config: Config) -> None:
        raise NotImplementedError

    @staticmethod
    def let_go() -> None:
        """Keep the program from waiting for its server when this process ends."""


class Served(Tracker):
    """Calls a service of the class `kind` in a thread. `scalars` and `event` raise TimeoutError if it falls behind."""

    def __init__(self, kind: type[Service], folder: Path, config: Config) -> None:
        self._kind, self._outlet = kind, Outlet(kind.name, failures=Exception)
        self._calls: SimpleQueue[Callable[[Service], None] | None] = SimpleQueue()  # None: no more
        self._thread = Thread(target=self._work, args=(folder, config), name=kind.name, daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        copied = dict(values)
        self._put(lambda service: service.scalars(step, copied))

    def event(self, step: int, name: str, text: str) -> None:
        self._put(lambda service: service.event(step, name, text))

    def end(self, code: int) -> None:
        self._calls.put(lambda service: service.end(code))
        self._calls.put(None)

    def wait(self, patience: float) -> None:
        self._thread.join(max(patience, 0))
        if self._thread.is_alive():
            Thread(target=self._kind.let_go, daemon=True).start()
            raise TimeoutError(f"not everything was sent in time{self._kind.remedy}")

    def _put(self, call: Callable[[Service], None]) -> None:
        if self._calls.qsize() >= MAX_REPORTS:
            raise TimeoutError(f"{MAX_REPORTS:,} reports wait to be sent")
        if self._thread.is_alive():  # else it has told why not
            self._calls.put(call)

    def _work(self, folder: Path, config: Config) -> None:
        service = None
        with self._outlet:
            service = self._kind(folder, config)
        while service is not None and (call := self._calls.get()) is not None:
            with self._outlet:
                call(service)


def kept_id(path: Path, project: str | None) -> str | None:
    """The id in the file `path`; None if it has none of this project. Raises InputError for a damaged file."""
    if not exists(path):
        return None
    found = read_object(path, 4096)
    known = found.get("id")
    if not isinstance(known, str) or not ID.fullmatch(known):
        raise InputError(f"{path}: has no id of a tracked run; remove the file to begin a new one there")
    return known if found.get("project") == project else None


def keep_id(path: Path, project: str | None, known: str) -> None:
    """Write the id of a run of this project to the file `path`. Raises InputError."""
    write_object(path, {"project": project, "id": known})
