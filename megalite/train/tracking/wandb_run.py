"""Weights & Biases."""

import importlib
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.secrets import shareable
from megalite.config.convert import to_plain
from megalite.config.schema import Config
from megalite.train.tracking.served import Service, keep_id, kept_id

log = logging.getLogger("megalite")


class WandbRun(Service):
    """A run of the project `config.log.wandb`.

    The x axis of the curves is a value named `step`, because wandb's own step never goes back.
    """

    name = "wandb"
    remedy = "; `wandb sync` sends what is in the folder wandb of the run folder"

    def __init__(self, folder: Path, config: Config) -> None:
        wandb, project, path = importlib.import_module("wandb"), config.log.wandb, folder / "wandb.json"
        known = kept_id(path, project)
        if known is None:
            known = secrets.token_hex(8)
            keep_id(path, project, known)
        self._run: Any = wandb.init(
            project=project,
            name=config.run.name,
            id=known,
            resume="allow",
            dir=str(folder),
            config=shareable(to_plain(config)),
            settings=wandb.Settings(console="off", silent=True),  # the console is ours; silent: asks for no key there
        )
        self._run.define_metric("*", step_metric="step")
        log.info("wandb: %s", self._run.dir if self._run.offline else self._run.url)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def event(self, step: int, name: str, text: str) -> None:
        self._run.log({f"event/{name}": text, "step": step})

    def end(self, code: int) -> None:
        self._run.finish(exit_code=code)

    @staticmethod
    def let_go() -> None:
        importlib.import_module("wandb").teardown()
