"""The evidence about one family: verified, trained, resumed in another layout, and compared with transformers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.base.files import read_object, write_whole
from megalite.commands.main import main
from megalite.commands.report.run_facts import Start
from megalite.config.load import dump
from megalite.distributed.start.local import launch
from megalite.plan.model.size import model_parameters
from megalite.train.folder.records import read_records
from megalite_tools.cards.families import FAMILIES, RESUMED_AT, STEPS, VERIFY, layout_of, small

LOGITS = "megalite_tools.cards.logits"
MAX_BYTES = 1 << 20  # bytes of a JSON file


@dataclass(frozen=True)
class Card:
    """Results of a family. Differences are relative; a tolerance is that of `megalite verify`.

    verified: its JSON. losses: of the uninterrupted run on one rank, by step. resumed: of the run that went on in
    `layout` after `RESUMED_AT` steps. logits: as `logits.compare` returns them. start: the record of the last start.
    """

    family: str
    parameters: int
    layout: tuple[str, ...]
    verified: dict[str, Any]
    losses: dict[int, float]
    resumed: dict[int, float]
    logits: dict[str, Any]
    start: Start

    @property
    def worst(self) -> dict[str, Any]:
        """The row of `megalite verify` that is nearest to its tolerance, or above it."""
        rows: list[dict[str, Any]] = self.verified["differences"]

        def share(row: dict[str, Any]) -> float:
            found, limit = row["difference"], row["tolerance"]
            return float("inf") if found is None else found / limit if limit else float("inf") if found else 0.0

        return max(rows, key=share)

    @property
    def loss_difference(self) -> float:
        """The largest difference of losses after the resumption."""
        return max(difference for _, difference in self.differences)

    @property
    def resumed_losses(self) -> list[tuple[int, float]]:
        """Steps after the resumption with their losses."""
        return [(step, self.resumed[step]) for step in range(RESUMED_AT + 1, STEPS + 1)]

    @property
    def differences(self) -> list[tuple[int, float]]:
        """Steps after the resumption with the relative difference of their loss from the uninterrupted one."""
        return [(step, abs(self.losses[step] - loss) / self.losses[step]) for step, loss in self.resumed_losses]


def folder_name(family: str) -> str:
    return family.lower().replace(" ", "_").replace(".", "_")


def make(family: str, store: Path, out: Path) -> Card:
    """Do everything for one family, in the new folder `out`. Raises InputError if a part fails."""
    layout, config = layout_of(FAMILIES[family][0]), small(family, store, out)
    out.mkdir(parents=True)
    file = out / "config.yaml"
    write_whole(file, dump(config))
    with _told_in(out / "log.txt"):
        _do("verify", FAMILIES[family][0], *layout, *VERIFY, "--json", str(out / "verify.json"))
        _do("train", str(file), "run.name=uninterrupted", "checkpoint.export=hf")
        _do("train", str(file), f"train.steps={RESUMED_AT}")
        _do("train", str(file), *layout)
        _do("report", str(out / "run"), "--html", str(out / "run.html"))
        name = f"step-{STEPS:08d}"
        alone = out / "uninterrupted"
        paths = [str(alone / "checkpoints" / name), str(alone / "export" / name), str(out / "logits.json")]
        if launch(LOGITS, paths, 1, shared=LOGITS):
            raise InputError(f"{out}: logits could not be compared; log.txt there has the reason")
    return found(family, model_parameters(config.model).total, layout, out)


def found(family: str, parameters: int, layout: tuple[str, ...], out: Path) -> Card:
    """Read the card of a family from the folder `out` that `make` has filled.

    Raises InputError if a run lacks the loss of a step, or the last start was not resumed after `RESUMED_AT` steps.
    """
    starts = sorted((out / "run" / "starts").glob("*.json"))
    start = Start(starts[-1].stem, read_object(starts[-1], MAX_BYTES))
    if start.mapping("resumed").get("step") != RESUMED_AT:
        raise InputError(f"{starts[-1]}: resumed is {start.fields.get('resumed')!r}, not at step {RESUMED_AT}")
    verified, logits = (read_object(out / name, MAX_BYTES) for name in ("verify.json", "logits.json"))
    alone, resumed = (_losses(out / run) for run in ("uninterrupted", "run"))
    return Card(family, parameters, layout, verified, alone, resumed, logits, start)


def _losses(run: Path) -> dict[int, float]:
    records = read_records(run / "metrics.jsonl")
    losses = {record["step"]: record["loss"] for record in records if record.get("loss") is not None}
    if missing := sorted(set(range(1, STEPS + 1)) - losses.keys()):
        raise InputError(f"{run}/metrics.jsonl: has no loss of step {missing[0]}; every step has one")
    return losses


def _do(command: str, *arguments: str) -> None:
    """Run a command of `megalite` in this process; its ranks are forks, so nothing is imported again."""
    code = main([command, *arguments])
    if code and (command, code) != ("verify", ExitCode.FAILED):  # the card shows what differs
        raise InputError(f"megalite {command} {' '.join(arguments)}: ended with exit code {code}; log.txt tells why")


@contextmanager
def _told_in(log: Path) -> Iterator[None]:
    """Write to `log` what this process and its ranks print meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, old in zip((1, 2), kept, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
