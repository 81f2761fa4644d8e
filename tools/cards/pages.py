"""Cards as pages and as one Markdown table."""

from collections.abc import Sequence

from megalite.commands.report.run_facts import Start
from megalite_launch.base.texts import markdown_table
from megalite_launch.page.charts import curve_chart
from megalite_launch.page.html import badge, columns, escape, paragraph, section, table
from megalite_launch.page.style import document
from megalite_tools.cards.card import Card, folder_name
from megalite_tools.cards.families import FAMILIES, RESUMED_AT, STEPS
from megalite_tools.report_file import cpu_name

MAX_LOSS_DIFFERENCE = 1e-12  # relative, of losses in float64 whose sums have another order
MAX_LOGIT_DIFFERENCE = 1e-5  # relative, of logits in float32
COLUMNS = ("family", "presets", "parameters", "layout", "`verify`", "loss", "resumed", "transformers", "logits")
PACKAGES = ("megalite", "torch", "transformers", "numpy")
PAGE = """\
# Cards

Evidence for every family of presets, at small size. `make cards` makes this page in some minutes on two cores, and
pages with loss curves and the report of each run in `build/cards/index.html`.

Made with {versions} on {machine}.

{table}
- *layout*: four ranks. `verify` compares the family's first preset there with one process in float64; shown is the
  quantity that came nearest to its tolerance (of losses, norms, gradients, weights and the choices of experts).
- *loss*: at the first and the last of {steps} steps, in float64 on one rank, of a copy of that preset with as many
  *parameters*, on the bytes of Python's sources.
- *resumed*: the same run stopped after {resumed} steps on one rank and went on in the layout; the largest relative
  difference of a loss from the uninterrupted one, of which at most {loss_limit:.0e} is allowed.
- *logits*: largest relative difference in float32 between the trained weights here and, exported to Hugging Face's
  form, in the class of *transformers*; at most {logit_limit:.0e} is allowed.
"""


def passed(card: Card) -> bool:
    """Return whether every number of a card is within its limit."""
    verified = all(row["passed"] for row in card.verified["differences"])
    close = card.loss_difference <= MAX_LOSS_DIFFERENCE and card.logits["difference"] <= MAX_LOGIT_DIFFERENCE
    return verified and close


def markdown(cards: Sequence[Card]) -> str:
    """The text of docs/cards.md."""
    return PAGE.format(
        versions=versions(cards[0].start),
        machine=cpu_name(),
        table=markdown_table(COLUMNS, [row(card) for card in cards]),
        steps=STEPS,
        resumed=RESUMED_AT,
        loss_limit=MAX_LOSS_DIFFERENCE,
        logit_limit=MAX_LOGIT_DIFFERENCE,
    )


def row(card: Card) -> tuple[str, ...]:
    """The cells of a card in the table, under COLUMNS."""
    worst = card.worst
    return (
        card.family,
        ", ".join(FAMILIES[card.family]),
        f"{card.parameters:,}",
        layout_text(card),
        f"{worst['quantity']} {number(worst['difference'])}",
        f"{card.losses[1]:.3f} → {card.losses[STEPS]:.3f}",
        number(card.loss_difference),
        card.logits["model"],
        number(card.logits["difference"]),
    )


def layout_text(card: Card) -> str:
    """The axes of the layout that are larger than 1, as in `pp=2 tp=2`."""
    axes = (key.removeprefix("parallel.") for key in card.layout)
    return " ".join(axis for axis in axes if not axis.endswith("=1"))


def number(value: float | None) -> str:
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"


def versions(start: Start) -> str:
    """Commit and versions, of a record of a start."""
    packages = start.mapping("packages")
    named = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
    commit = f"commit {start.commit}" if start.commit else "no commit"
    return ", ".join([commit, f"Python {start.text('python')}", *named])


def card_page(card: Card) -> str:
    """The page of one family."""
    losses = curve_chart(
        "Loss",
        lambda value: f"{value:.3g}",
        [("one rank", sorted(card.losses.items()), 0), ("resumed, which covers it", card.resumed_losses, 1)],
        upright=[(RESUMED_AT, "resumed")],
    )
    apart = [("difference", card.differences, 3)]
    differences = curve_chart("Relative difference of losses", number, apart)
    checks = [
        (each["quantity"], number(each["difference"]), number(each["tolerance"]), _word(each["passed"]), each["where"])
        for each in card.verified["differences"]
    ]
    near = card.logits["difference"]
    report = f'<a href="{escape(folder_name(card.family))}/run.html">Report of the resumed run</a>'
    parts = [
        f"<header><h1>{escape(card.family)}</h1>",
        badge("passed", "good") if passed(card) else badge("failed", "bad"),
        paragraph(f"{card.parameters:,} parameters, a small copy of {FAMILIES[card.family][0]}."),
        paragraph(f"{versions(card.start)}; {cpu_name()}.", "pale"),
        "</header>",
        section(
            f"megalite verify in {layout_text(card)}",
            table(("quantity", "difference", "tolerance", "", "largest in"), checks, (0, 3, 4)),
        ),
        section(
            f"Loss, and resumed in {layout_text(card)} after {RESUMED_AT} steps",
            columns(f"<h3>Loss</h3>{losses}", f"<h3>Relative difference</h3>{differences}"),
            paragraph(f"Largest difference {number(card.loss_difference)}; allowed {MAX_LOSS_DIFFERENCE:.0e}."),
        ),
        section(
            "Logits beside transformers",
            paragraph(
                f"{card.logits['model']}, {card.logits['tokens']} tokens in float32: largest relative difference "
                f"{number(near)}; allowed {MAX_LOGIT_DIFFERENCE:.0e}."
            ),
        ),
        f'<p>{report} · <a href="index.html">All families</a></p>',
    ]
    return document(f"Card: {card.family}", "\n".join(parts))


def _word(good: bool) -> str:
    return "ok" if good else "differs"


def index_page(cards: Sequence[Card]) -> str:
    """The page that leads to all others."""
    rows = table(tuple(name.strip("`") for name in COLUMNS), [row(card) for card in cards], (0, 1, 3, 4, 7))
    names = ((folder_name(card.family), card.family) for card in cards)
    links = "\n".join(f'<li><a href="{escape(name)}.html">{escape(family)}</a></li>' for name, family in names)
    told = paragraph(f"{versions(cards[0].start)}; {cpu_name()}.", "pale")
    return document("Cards", "\n".join(["<h1>Cards</h1>", told, rows, f"<ul>{links}</ul>"]))
