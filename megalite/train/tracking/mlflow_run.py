"""mlflow."""

import importlib
import logging
import os
import posixpath
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.secrets import shareable
from megalite.config.convert import leaves, to_plain
from megalite.config.schema import Config
from megalite.train.tracking.served import Service, keep_id, kept_id

PARAMETERS_PER_CALL = 100  # mlflow's limit
MAX_PARAMETER = 500  # characters of a value that every version of mlflow takes
MAX_TAG = 5000  # the same of a tag

log = logging.getLogger("megalite")


class MlflowRun(Service):
    """A run of the experiment `config.log.mlflow`.

    It is in the store that MLFLOW_TRACKING_URI names, or else in files in the folder `mlflow` of the run folder. A new
    run gets the configuration as parameters, which mlflow never changes. An event is a tag with the latest of its kind.
    """

    name = "mlflow"

    def __init__(self, folder: Path, config: Config) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        self._entities: Any = importlib.import_module("mlflow.entities")
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions of mlflow ask for that
            store = (folder / "mlflow").absolute().as_uri()
        self._client: Any = tracking.MlflowClient(tracking_uri=store)
        path, project = folder / "mlflow.json", config.log.mlflow
        known = kept_id(path, project)
        if known is None:
            known = self._begin(project, config)
            keep_id(path, project, known)
        else:
            self._go_on(known, path)
        self._id = known
        log.info("mlflow: run %s", known)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        self._client.log_batch(
            self._id, [metric(metric_name(name), value, now, step) for name, value in values.items()]
        )

    def event(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._id, f"event.{name}", f"step {step}: {text}"[:MAX_TAG])

    def end(self, code: int) -> None:
        self._client.set_terminated(self._id, "FAILED" if code else "FINISHED")

    def _begin(self, project: str | None, config: Config) -> str:
        run = self._client.create_run(self._experiment(project), run_name=config.run.name)
        param = self._entities.Param
        params = [
            param(metric_name(key), str(value)[:MAX_PARAMETER]) for key, value in leaves(shareable(to_plain(config)))
        ]
        for first in range(0, len(params), PARAMETERS_PER_CALL):
            self._client.log_batch(run.info.run_id, params=params[first : first + PARAMETERS_PER_CALL])
        return str(run.info.run_id)

    def _go_on(self, known: str, path: Path) -> None:
        exceptions: Any = importlib.import_module("mlflow.exceptions")
        try:
            self._client.get_run(known)
        except exceptions.MlflowException as error:
            raise InputError(f"{path}: {error}; remove the file to begin a new run there") from None
        self._client.update_run(known, status="RUNNING")

    def _experiment(self, name: str | None) -> str:
        """The id of an experiment, which is made if it is not there."""
        exceptions: Any = importlib.import_module("mlflow.exceptions")
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except exceptions.MlflowException:  # another run may have made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def metric_name(name: str) -> str:
    """A name that mlflow takes: a relative path in its shortest form, of letters, digits, spaces and `_-./`."""
    return posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII).replace("..", "__").lstrip("/"))
