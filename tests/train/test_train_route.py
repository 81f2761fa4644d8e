"""The way of a batch through a training step, as `docs/architecture.md` tells it, by a trace of all calls."""

import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType

from memory_cases import configured
from toy_jobs import make, one_rank

from megalite.commands.verify import random_batch
from megalite.train.step import train_step

ROOT = Path(__file__).parents[2]
PACKAGES = {ROOT / "megalite": "", ROOT / "kernels": "megalite_kernels/"}
TOLD = (ROOT / "docs" / "architecture.md").read_text().split("## One batch's route")[1].split("\n## ")[0]
ROUTE = re.findall(r"`([\w/]+)`(?: →|\n)", TOLD)
STEP = ROUTE[ROUTE.index("train/step") :]
PLANNING = re.compile(
    r"plan/|config/(load|rules|validate)|schedule/(generate|orders|communication|check|simulate|zero_bubble)"
)
Call = tuple[str, list[str]]  # the file of a function, and those of its callers


def test_a_batch_crosses_the_files_that_the_docs_name_in_their_order() -> None:
    assert len(ROUTE) <= 10
    calls = _calls_of_a_step()
    crossed = [file for file, _ in calls if file in STEP]
    assert list(dict.fromkeys(crossed)) == STEP
    climbs = [
        (file, caller)
        for file, callers in calls
        for caller in callers
        if {file, caller} <= {*STEP} and STEP.index(file) < STEP.index(caller)
    ]
    assert not climbs
    assert not [file for file, _ in calls if PLANNING.match(file)]


def _calls_of_a_step() -> list[Call]:
    """All calls of our own functions in a step that is not the first, in order."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = _file(frame.f_code.co_filename)
        if event != "call" or not file:
            return
        callers, above = [], frame.f_back
        while above is not None:
            callers.append(_file(above.f_code.co_filename))
            above = above.f_back
        found.append((file, callers))

    with one_rank():
        job = make(configured({"train.precision": "fp32", "batch.global": 4, "batch.micro": 2}))
        batch = random_batch(job, 0)
        train_step(job, batch, 0)
        sys.setprofile(note)
        try:
            train_step(job, batch, 1)
        finally:
            sys.setprofile(None)
    return found


@cache
def _file(name: str) -> str:
    """The package and module of a file of ours; "" for others."""
    for root, prefix in PACKAGES.items():
        if Path(name).is_relative_to(root):
            return prefix + str(Path(name).relative_to(root).with_suffix(""))
    return ""
