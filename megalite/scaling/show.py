"""Prints the output of `megalite-sweep … fit`: the content of `fit.json` as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from megalite.base.errors import counted, printable
from megalite.base.terminal import console, sections, table
from megalite.scaling.law import NAMES

Part = tuple[str, RenderableType]
METHOD_NAMES = {"approach1": "1, envelope", "approach2": "2, isoFLOP", "approach3": "3, parametric", "kaplan": "Kaplan"}
DEFINITION_NAMES = {"with_head": "layers + output layer", "total": "all", "non_embedding": "layers"}


def show(found: Mapping[str, Any]) -> None:
    sections(console(), parts(found))


def parts(found: Mapping[str, Any]) -> list[Part]:
    """Headings and tables, the same as in the report."""
    made: list[Part] = [("Runs", facts(found))]
    if "fits" in found:
        made.append((f"Law: loss = E + A / N^alpha + B / D^beta, {_level(found)}", laws(found)))
        made.append(("Best size by budget, N_opt ∝ C^a and D_opt ∝ C^(1-a)", exponents(found)))
        if found["holdout"]:
            made.append((f"Held-out runs, by {found['holdout_method']}", held_out(found)))
        made.append((f"Predictions by {found['settings']['method']}, {_level(found)}", predictions(found)))
        made.append(("Approach 3 without the highest losses, and with other deltas", sensitivity(found)))
    for scan in found["rates"]:
        made.append((f"Best {scan['key']}: {scan['estimator']}", optima(scan)))
        made.append((f"Power law of {scan['key']}", Text(power_laws(scan))))
    fitted = [task for task in found["downstream"] if "sigmoid" in task]
    if fitted:
        made.append(("Accuracy by loss", downstream(fitted)))
    if found["data"]["dropped"]:
        made.append(("Finished runs left out", dropped(found)))
    if found["caveats"]:
        made.append(("Mind", Text("\n".join(f"• {printable(each)}" for each in found["caveats"]))))
    return made


def facts(found: Mapping[str, Any]) -> Table:
    data, settings = found["data"], found["settings"]
    made = table("", "value", text=("", "value"))
    shown = {"flops": "{:.3g}".format}  # as budgets are given; T is for tokens
    spans = [f"{name} {' – '.join(map(shown.get(name, amount_text), ends))}" for name, ends in data["span"].items()]
    made.add_row("fitted", f"{counted(data['runs'], 'run')} of {counted(data['sizes'], 'size')}, by {data['loss']}")
    made.add_row("span", "; ".join(spans))
    rungs = f" of the rungs {', '.join(settings['holdout'])}" if settings["holdout"] else ""
    made.add_row("held out", f"{counted(len(data['held_out']), 'run')}{rungs}")
    made.add_row("left out", counted(len(data["dropped"]), "run"))
    made.add_row("fewest steps", "unknown" if data["fewest_steps"] is None else f"{data['fewest_steps']:,}")
    if data["seed_noise"] is not None:
        made.add_row("seeds", f"differ by {data['seed_noise']:.2%} (standard deviation of the loss)")
    made.add_row("N counts", DEFINITION_NAMES[settings["parameters"]])
    if found["kind"] == "ladder":
        dropped = settings["drop"] if isinstance(settings["drop"], int) else f"{len(settings['drop'])} named"
        made.add_row("policy", f"delta {settings['delta']:g}, min_steps {settings['min_steps']:,}, drop {dropped}")
    return made


def laws(found: Mapping[str, Any]) -> Table:
    made = table("N counts", *NAMES, "a", "rms", "R²", "starts that agree", text=("N counts",))
    for definition, fits in found["fits"].items():
        fit = fits["approach3"]
        if "failed" in fit:
            made.add_row(DEFINITION_NAMES[definition], printable(fit["failed"])[:100], *[""] * 8)
            continue
        cells = [interval_text(fit["intervals"][name]) for name in NAMES]
        quality = [f"{fit['rms']:.2%}", "" if fit["r2"] is None else f"{fit['r2']:.4f}"]
        made.add_row(
            DEFINITION_NAMES[definition],
            *cells,
            interval_text(fit["exponent"]),
            *quality,
            f"{fit['agreeing']} of {fit['starts']}",
        )
    return made


def exponents(found: Mapping[str, Any]) -> Table:
    made = table(
        "approach", *(DEFINITION_NAMES[name] for name in found["fits"]), "why not", text=("approach", "why not")
    )
    for method, name in METHOD_NAMES.items():
        fits = [each[method] for each in found["fits"].values()]
        cells = ["–" if "failed" in fit else interval_text(fit["exponent"]) for fit in fits]
        why = next((fit["failed"] for fit in fits if "failed" in fit), "")
        made.add_row(name, *cells, printable(why))
    return made


def held_out(found: Mapping[str, Any]) -> Table:
    made = table("run", "N", "D", "× largest C", "measured", "predicted", "error", "inside", text=("run",))
    for row in found["holdout"]:
        made.add_row(
            printable(row["slug"]),
            amount_text(row["parameters"]),
            amount_text(row["tokens"]),
            f"{row['times']:.3g}",
            f"{row['measured']:.4f}",
            interval_text(row["predicted"]),
            f"{row['error']:+.2%}",
            {True: "yes", False: "no", None: ""}[row["inside"]],
        )
    return made


def predictions(found: Mapping[str, Any]) -> Table:
    made = table("FLOPs", "× largest C", "N_opt", "D_opt", "loss")
    for row in found["predictions"]:
        made.add_row(
            f"{row['flops']:.3g}",
            f"{row['times']:,.0f}",
            *(interval_text(row[name], amount_text) for name in ("parameters", "tokens")),
            interval_text(row["loss"]),
        )
    return made


def sensitivity(found: Mapping[str, Any]) -> Table:
    made = table("", *NAMES, "a", text=("",))
    settings = found["settings"]
    for name, rows in found["sensitivity"].items():
        for row in rows:
            mark = " (chosen)" if row[name] == settings[name] else ""
            label = f"{name} {row[name]:g}{mark}"
            if "failed" in row:
                made.add_row(label, printable(row["failed"])[:100], *[""] * len(NAMES))
            else:
                made.add_row(label, *(significant(row[each]) for each in NAMES), f"{row['exponent']:.3f}")
    return made


def optima(scan: Mapping[str, Any]) -> Table:
    made = table("cell", "N", "D", "best", "loss there", "why none", text=("cell", "why none"))
    for cell in scan["cells"]:
        best = ["–", "–"] if cell["best"] is None else [significant(cell["best"]), f"{cell['lowest']:.4f}"]
        made.add_row(
            printable(cell["label"]), amount_text(cell["N"]), amount_text(cell["D"]), *best, printable(cell["why"])
        )
    return made


def power_laws(scan: Mapping[str, Any]) -> str:
    """A line for each family of cells, with its intervals."""
    return "\n".join(
        f"{law['family']}: {_power_law(scan, law)}" if law["family"] else _power_law(scan, law) for law in scan["laws"]
    )


def _power_law(scan: Mapping[str, Any], law: Mapping[str, Any]) -> str:
    if law["why"]:
        return f"none: {law['why']}"
    terms = " · ".join(f"{name}^{interval_text(value)}" for name, value in law["exponents"].items())
    exact = (
        "as many cells as unknowns, so nothing tells how good it is" if law["rms"] is None else f"rms {law['rms']:.1%}"
    )
    return f"{scan['key']} = exp({interval_text(law['constant'])}) · {terms}; {counted(law['cells'], 'cell')}, {exact}"


def downstream(fitted: Sequence[Mapping[str, Any]]) -> Table:
    made = table(
        "task", "runs", "sigmoid a / (1 + exp(k(L - m))) + b", "rms", "error ε - k·exp(-γL)", "rms", text=("task",)
    )
    for task in fitted:
        one, two = task["sigmoid"], task["error_law"]
        made.add_row(
            printable(task["name"]),
            str(len(task["losses"])),
            f"a {one['a']:.3f}, b {one['b']:.3f}, k {one['k']:.3g}, m {one['middle']:.3f}",
            f"{one['rms']:.4f}",
            f"ε {two['most']:.3f}, ln k {two['ln_k']:.3g}, γ {two['gamma']:.3g}",
            f"{two['rms']:.4f}",
        )
    return made


def dropped(found: Mapping[str, Any]) -> Table:
    made = table("run", "why", text=("run", "why"))
    for row in found["data"]["dropped"]:
        made.add_row(printable(f"{row['slug']}-{row['id']}"), printable(row["why"]))
    return made


def amount_text(value: float) -> str:
    """`1.23 B` parameters or tokens: with T for 1e12 and B for 1e9, as people say them."""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if 0.9995 * size <= value < 1e15:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def significant(value: float) -> str:
    return f"{value:.4g}"


def interval_text(values: Sequence[float | None], text: Any = significant) -> str:
    """`.35 (.33 – .37)`."""
    value, low, high = values
    if value is None:
        return "–"
    if low is None or high is None:
        return str(text(value))
    return f"{text(value)} ({_short(text, low)} – {_short(text, high)})"


def _short(text: Any, value: float) -> str:
    """The end of an interval, which needs fewer digits."""
    return f"{value:.3g}" if text is significant else str(text(value))


def _level(found: Mapping[str, Any]) -> str:
    return f"with intervals of {found['settings']['interval']:.0%}"
