"""Weights & Biases, served by a thread of its own, so that its network, disk and server do not delay training."""

import importlib
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import exists, read_object, write_object
from megalite.base.output import Outlet
from megalite.config.convert import to_plain
from megalite.config.schema import Config

MAX_REPORTS = 10_000  # reports that wait for Weights & Biases
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

log = logging.getLogger("megalite")


class WandbRun:
    """A run of the project `config.log.wandb`. When the run in `folder` goes on, it is the same one.

    An error that Weights & Biases raises is told once. Methods raise TimeoutError if it falls behind. The x axis of the
    curves is a value named `step`, because wandb's own step never goes back.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder, self._config = folder, config
        self._outlet = Outlet("wandb", failures=Exception)
        self._calls: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()  # calls to a run; None: no more
        self._thread = Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one point to every curve."""
        if self._calls.qsize() >= MAX_REPORTS:
            raise TimeoutError(f"{MAX_REPORTS:,} reports wait to be sent")
        point = {**values, "step": step}
        if self._thread.is_alive():  # else it has told why not
            self._calls.put(lambda run: run.log(point))

    def event(self, step: int, name: str, text: str) -> None:
        """Add a text."""
        self.scalars(step, {f"event/{name}": text})

    def close(self, code: int, patience: float) -> None:
        """End the run with an exit code; wait at most `patience` seconds for what is still to be sent."""
        self._calls.put(lambda run: run.finish(exit_code=code))
        self._calls.put(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            Thread(target=_let_go, daemon=True).start()
            raise TimeoutError(
                f"not everything was sent in time; `wandb sync` sends what is in {self._folder / 'wandb'}"
            )

    def _work(self) -> None:
        run = None
        with self._outlet:
            run = self._begin()
        while run is not None and (call := self._calls.get()) is not None:
            with self._outlet:
                call(run)

    def _begin(self) -> Any:
        wandb, project = importlib.import_module("wandb"), self._config.log.wandb
        run = wandb.init(
            project=project,
            name=self._config.run.name,
            id=run_id(self._folder / "wandb.json", project),
            resume="allow",
            dir=str(self._folder),
            config=to_plain(self._config),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours; silent: asks for no key there
        )
        run.define_metric("*", step_metric="step")
        log.info("wandb: %s", run.dir if run.offline else run.url)
        return run


def run_id(path: Path, project: str | None) -> str:
    """The id in the file `path`, or a new one if the file has none of this project. Raises InputError."""
    if exists(path):
        found = read_object(path, 4096)
        known = found.get("id")
        if not isinstance(known, str) or not ID.fullmatch(known):
            raise InputError(
                f"{path}: has no id of a run of Weights & Biases; remove the file to begin a new one there"
            )
        if found.get("project") == project:
            return known
    new = secrets.token_hex(8)
    write_object(path, {"project": project, "id": new})
    return new


def _let_go() -> None:
    """Keep wandb from waiting for its server when this process ends."""
    importlib.import_module("wandb").teardown()
