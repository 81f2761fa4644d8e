"""`megalite-sweep … report`: one page about an experiment."""

from pathlib import Path

from megalite.base.errors import InputError, counted, printable
from megalite.base.files import check_output, write_whole
from megalite.config.yaml import read_text
from megalite.report import curves, ladder, sweep, systems
from megalite.report.found import FoundLaws
from megalite.report.page import page
from megalite.report.picture import Picture, drawn
from megalite.report.pictures import need_matplotlib
from megalite.scaling.settings import read_settings
from megalite.scaling.stored import read_fit
from megalite.scaling.table import read_results

FOLDER, PAGE = "report", "index.html"
MAX_BYTES = 1 << 20


def report(folder: Path) -> None:
    """Write `report/index.html` in the experiment's `folder`, with a PNG and a CSV of every picture beside it.

    Reads `experiment.yaml`, `results.csv`, and where they exist `fit.json` and the metrics of runs. Raises InputError
    for files that cannot be read.
    """
    need_matplotlib()
    settings = read_settings(folder)
    results = read_results(folder / "results.csv")
    if not results.runs:
        raise InputError(f"{folder / 'results.csv'}: has no runs; megalite-sweep collect fills it")
    out = folder / FOLDER
    check_output(out / PAGE)
    found = FoundLaws(folder, settings, read_fit(folder, settings), results)
    configuration = read_text(folder / "experiment.yaml", MAX_BYTES)
    try:
        sections, notes = pictures(found)
        shown = [(heading, [drawn(picture) for picture in some]) for heading, some in sections]
        text = page(found, shown, notes, configuration)
    except InputError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        if not found.fit:
            raise
        what = f"{type(error).__name__}: {error}"
        rule = f"is not what megalite-sweep fit writes ({what:.200}); run it again"
        raise InputError(f"{folder / 'fit.json'}: {rule}") from error
    for _, some in shown:
        for each in some:
            write_whole(out / f"{each.picture.name}.png", each.png)
            write_whole(out / f"{each.picture.name}.csv", each.table)
    write_whole(out / PAGE, text)
    count = sum(len(some) for _, some in shown)
    print(printable(f"{out / PAGE}: {counted(len(results.runs), 'run')}, {counted(count, 'picture')}"))


def pictures(found: FoundLaws) -> tuple[list[tuple[str, list[Picture]]], list[str]]:
    """Draw all pictures that there are numbers for, under headings, and what could not be read."""
    lines, notes = curves.pictures(found)
    kind = found.settings.kind
    sections = [
        ("How the cluster scales", systems.pictures(found.results) if kind == "systems" else []),
        ("Losses", [*lines, *(ladder.pictures(found) if kind == "ladder" else [])]),
        ("IsoFLOP and draws", [*ladder.isoflop(found), *ladder.pairs(found)] if kind == "ladder" else []),
        ("Rates and batches", sweep.pictures(found)),
        ("Tasks", sweep.downstream(found)),
    ]
    return sections, notes
