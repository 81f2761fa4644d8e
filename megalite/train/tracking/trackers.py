"""The trackers that a configuration asks for."""

from pathlib import Path

from megalite.base.output import Outlet
from megalite.config.schema import Config
from megalite.train.tracking.board import Board
from megalite.train.tracking.mlflow_run import MlflowRun
from megalite.train.tracking.prometheus import Prometheus
from megalite.train.tracking.served import Served, Service
from megalite.train.tracking.tracker import Tracker
from megalite.train.tracking.wandb_run import WandbRun


def trackers_of(folder: Path, config: Config, step: int) -> list[tuple[Outlet, Tracker]]:
    """Start all trackers of the run in `folder`, which stands at `step`. Each is told of with its outlet.

    One that cannot be started is told and left out.
    """
    log = config.log
    found: list[tuple[Outlet, Tracker]] = []
    if log.tensorboard:
        board = Board(folder / "tensorboard")
        found.append((Outlet(str(board.path)), board))
    services: list[tuple[type[Service], str | None]] = [(WandbRun, log.wandb), (MlflowRun, log.mlflow)]
    found += [(Outlet(kind.name), Served(kind, folder, config)) for kind, name in services if name is not None]
    if log.prometheus is not None:
        outlet = Outlet(f"log.prometheus = {log.prometheus}", failures=Exception)
        with outlet:
            restarts = max(0, len(list((folder / "starts").glob("*.json"))) - 1)  # this start is recorded there
            metrics = Prometheus(log.prometheus, config.run.name, step, config.train.steps, restarts)
            found.append((outlet, metrics))
    return found
