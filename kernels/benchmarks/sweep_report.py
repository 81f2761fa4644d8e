"""The results of a sweep: the program that ships beside the fastest one, as data, and as a page of Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalite_kernels.benchmarks.measure import AGREEMENT
from megalite_kernels.benchmarks.report import facts, median, number, share_of_copy
from megalite_kernels.benchmarks.sweep import Trial
from megalite_launch.base.texts import markdown_table


@dataclass(frozen=True)
class Comparison:
    """One pass: the program that ships, and the fastest of those timed together with it, which may be itself."""

    shipped: Trial
    best: Trial | None

    @property
    def gain(self) -> float | None:
        """The part of the shipped program's time that the best one saves."""
        if self.best is None or self.shipped.seconds is None:
            return None
        return 1 - median(self.best) / self.shipped.seconds.median


def comparisons(trials: Iterable[Trial]) -> list[Comparison]:
    found = []
    for of_pass in _passes(trials):
        shipped = next(trial for trial in of_pass if trial.is_shipped)
        finalists = [trial for trial in of_pass if trial.is_finalist]
        found.append(Comparison(shipped, min(finalists, key=median, default=None)))
    return found


def _passes(trials: Iterable[Trial]) -> list[list[Trial]]:
    passes: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        passes.setdefault((trial.op, trial.model, trial.part), []).append(trial)
    return list(passes.values())


def comparison_table(trials: Iterable[Trial], copy: float) -> str:
    heads = ["op", "part", "width"]
    heads += [f"{which} {what}" for which in ("shipped", "best") for what in ("warps", "elements", "µs", "% of copy")]
    rows = []
    for one in comparisons(trials):
        shipped = one.shipped
        cells = [shipped.op, shipped.part, str(shipped.width), *_cells(shipped, copy), *_cells(one.best, copy)]
        rows.append([*cells, number(one.gain, 100, "{:.1f} %") if shipped.seconds else shipped.status])
    return markdown_table([*heads, "gain"], rows)


def _cells(trial: Trial | None, copy: float) -> list[str]:
    """Program, time, and share of a copy's bandwidth."""
    if trial is None:
        return ["–"] * 4
    seconds = trial.seconds.median if trial.seconds else None
    share = number(share_of_copy(trial, copy), 100, "{:.0f}")
    return [str(trial.warps), str(trial.elements), number(seconds, 1e6), share]


def trial_table(trials: Iterable[Trial], copy: float) -> str:
    heads = ["op", "part", "width", "warps", "elements", "µs", "% of copy", "rounds", "result"]
    rows = []
    for trial in trials:
        rounds = number(trial.seconds.rounds if trial.seconds else None, 1, "{:.0f}")
        result = trial.status + ", ships" * trial.is_shipped
        rows.append([trial.op, trial.part, str(trial.width), *_cells(trial, copy), rounds, result])
    return markdown_table(heads, rows)


def agreement_table(trials: Iterable[Trial]) -> str:
    """The number of programs that agree in each pass, and the results of all others."""
    rows = []
    for of_pass in _passes(trials):
        agreeing = [trial for trial in of_pass if trial.status == AGREEMENT]
        results = [("", f"{len(agreeing)} of {len(of_pass)} agree")]
        results += [(trial.name, trial.status) for trial in of_pass if trial.status != AGREEMENT]
        rows += [[of_pass[0].op, of_pass[0].part, str(of_pass[0].width), *result] for result in results]
    return markdown_table(["op", "part", "width", "program", "result"], rows)


def sweep_data(head: dict[str, Any], trials: Sequence[Trial], copies: dict[str, float]) -> dict[str, Any]:
    """All results as data for JSON. head: facts of the run and its machine; copies: bytes per second of every copy."""
    copy = max(copies.values())
    return {
        **head,
        "copies_bytes_per_second": copies,
        "rows": [asdict(trial) | {"share_of_copy": share_of_copy(trial, copy)} for trial in trials],
    }


def sweep_page(head: dict[str, Any], trials: Sequence[Trial], copies: dict[str, float]) -> str:
    """All results as a page of Markdown."""
    copy = max(copies.values())
    return f"""# Sizes of the kernels' programs

{facts(head, copies)}

Each kernel ran with several numbers of warps, and of elements in a program's block. Width is the number of elements of
a row; for adamw, of all tensors. Times are medians on the GPU. % of copy counts what an op must at least read and
write, as a share of the bandwidth of the copy above. Gain is the part of the shipped program's time that the best
program saves: 0 where the shipped one is the fastest. Both were timed in turns, in more rounds than slower programs.

{comparison_table(trials, copy)}
## Every program

{trial_table(trials, copy)}"""
