"""`megalite-sweep … fit`: the laws that the finished runs of an experiment tell."""

from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import check_output, write_object
from megalite.scaling.record import record
from megalite.scaling.settings import read_settings
from megalite.scaling.show import show
from megalite.scaling.table import read_results

FILE, RESULTS = "fit.json", "results.csv"


def fit(folder: Path) -> None:
    """Fit what the kind of the experiment in `folder` asks for, write `fit.json` there, and print tables.

    Reads `experiment.yaml` and `results.csv`. Raises InputError for files that cannot be read, and for runs that tell
    no law.
    """
    settings = read_settings(folder)
    if settings.kind == "systems":
        raise InputError(f"{folder}: kind = systems: has no law to fit; megalite-sweep report draws what it measured")
    results = read_results(folder / RESULTS)
    check_output(folder / FILE)
    try:
        found = record(results, settings)
    except InputError as error:
        raise InputError(f"{folder / RESULTS}: {error}") from None
    write_object(folder / FILE, found)
    show(found)
