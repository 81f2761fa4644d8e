"""`megalite-status`: how runs are, and where their time went."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from ..base.errors import UserError
from ..base.files import SHARED_MODE, write_whole
from ..base.outcome import DONE
from ..base.texts import printable
from ..watch.run import Watched, open_run
from ..watch.summary import Summary, summary
from ..watch.text import one_line, status_text
from . import page

LOOK_PERIOD = 2.0  # seconds between two looks
IDLE_LINE_PERIOD = 30.0  # seconds between two lines of a pipe on which nothing happens
CLEAR_SEQUENCE = "\x1b[H\x1b[J"
INDENT = "    "  # before the rest of a line that is too long


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("megalite-status", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run: run.dir/run.name")
    parser.add_argument("--follow", action="store_true", help="look again and again, until the runs are over")
    parser.add_argument("--json", action="store_true", help="one object per run and line")
    parser.add_argument("--html", metavar="FILE", help="write a page in place of text; of one run")
    given = parser.parse_args(arguments)
    if given.html is not None and len(given.runs) > 1:
        raise UserError("--html: a page shows one run; give one RUN")
    runs = [open_run(path) for path in given.runs]
    teller = _teller(given)
    while True:
        found = []
        for run in runs:
            run.update()
            found.append(summary(run))
        try:
            teller(runs, found)
        except OSError as error:
            if given.html is None:
                raise
            raise UserError(f"--html {printable(given.html)}: {error.strerror}; choose another file") from None
        if not given.follow or all(each["over"] for each in found):
            return DONE
        time.sleep(LOOK_PERIOD)


class _Teller:
    """Prints the full status of every run."""

    def __call__(self, runs: Sequence[Watched], found: Sequence[Summary]) -> None:
        print("\n\n".join(map(status_text, found)), flush=True)


class _Json(_Teller):
    def __call__(self, runs: Sequence[Watched], found: Sequence[Summary]) -> None:
        for each in found:
            print(json.dumps(each, allow_nan=False), flush=True)


class _Page(_Teller):
    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def __call__(self, runs: Sequence[Watched], found: Sequence[Summary]) -> None:
        write_whole(self.file, page.render(runs[0], found[0]), SHARED_MODE)


class _Screen(_Teller):
    """Draws in place, as much as fits."""

    def __call__(self, runs: Sequence[Watched], found: Sequence[Summary]) -> None:
        width, height = shutil.get_terminal_size()
        whole = "\n\n".join(map(status_text, found)).splitlines()
        lines = [part for line in whole for part in wrap(line, width, subsequent_indent=INDENT) or [""]]
        print(CLEAR_SEQUENCE + "\n".join(lines[: height - 1]), flush=True)


class _Lines(_Teller):
    """A line when the state changes, for every decision, and now and then for the steps."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[str, float, float]] = {}  # state, when it was told, and the latest decision

    def __call__(self, runs: Sequence[Watched], found: Sequence[Summary]) -> None:
        for each in found:
            name = each["run"]
            state, at, decided = self.told.get(name, ("", 0.0, each["time"] - IDLE_LINE_PERIOD))
            start = f"{printable(name)}: " if len(found) > 1 else ""
            for decision in each["decisions"]:
                if decision["time"] > decided:
                    decided = decision["time"]
                    print(f"{start}{decision['by']}: {decision['text']}", flush=True)
            if each["state"] != state or each["time"] - at >= IDLE_LINE_PERIOD:
                state, at = each["state"], each["time"]
                print(start + one_line(each), flush=True)
            self.told[name] = state, at, decided


def _teller(given: argparse.Namespace) -> _Teller:
    if given.html is not None:
        return _Page(given.html)
    if given.json:
        return _Json()
    if not given.follow:
        return _Teller()
    return _Screen() if sys.stdout.isatty() else _Lines()
