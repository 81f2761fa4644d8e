"""Content of a report: the runs of an experiment, and its laws where there is a fit."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megalite.scaling.forms import Array
from megalite.scaling.stored import Stored
from megalite.scaling.table import Results, RunResult


@dataclass(frozen=True)
class FoundLaws(Stored):
    """The laws of an experiment, and its runs."""

    results: Results

    @cached_property
    def which(self) -> str:
        """The column of the loss."""
        if self.fit:
            return str(self.fit["data"]["loss"])
        named = any(run.number("loss_valid") > 0 for run in self.results.done())
        return "loss_valid" if named else "loss_train"

    @cached_property
    def used(self) -> list[RunResult]:
        """The runs that were fitted; without a fit, all that have a loss."""
        runs = [run for run in self.results.done() if run.number(self.which) > 0 and self.size(run) > 0]
        runs = [run for run in runs if run.number("tokens") > 0]
        if not self.fit:
            return runs
        some = set(self.fit["data"]["used"])
        return [run for run in runs if run.id in some]

    @cached_property
    def held_out(self) -> list[RunResult]:
        some = set(self.fit["data"]["held_out"]) if self.fit else set()
        return [run for run in self.results.done() if run.id in some and run.number(self.which) > 0]

    def size(self, run: RunResult) -> float:
        return run.number(f"n_{self.settings.parameters}")

    def column(self, runs: list[RunResult], name: str) -> Array:
        if name == "N":
            return np.array([self.size(run) for run in runs])
        return np.array([run.number({"D": "tokens", "loss": self.which}.get(name, name)) for run in runs])

    @cached_property
    def stale(self) -> str:
        """The reason why `fit.json` does not belong to these results; empty where it does."""
        if not self.fit:
            return ""
        known = {run.id for run in self.results.done()}
        data = self.fit["data"]
        told = {*data["used"], *data["held_out"], *(row["id"] for row in data["dropped"])}
        if told == known:
            return ""
        more, fewer = len(known - told), len(told - known)
        return (
            f"fit.json is not of these results: {more} finished runs are not in it, and {fewer} of its runs are not in "
            "results.csv. Run megalite-sweep fit again."
        )
