"""Draws pictures with matplotlib, which is optional, on machines with or without a screen."""

import io
import warnings
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError, printable
from megalite.base.files import write_whole

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError:
    pyplot = ticker = None  # type: ignore[assignment]

__all__ = ["need_matplotlib", "plain", "pyplot", "save", "ticker"]


def need_matplotlib() -> None:
    """Raises InputError if matplotlib is not installed."""
    if pyplot is None:
        raise InputError("matplotlib is not installed; pip install 'megalite[plot]'")


def plain(text: str) -> str:
    """`text`, escaped so that matplotlib draws it as it is: without formulas, or labels hidden by an underscore."""
    text = printable(text.encode(errors="backslashreplace").decode())
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def save(figure: Any, out: Path) -> None:
    """Write a figure in the format of the suffix of `out`, whole or not at all, and close it.

    Raises InputError if the suffix is not that of a picture, or if the file cannot be written.
    """
    content = io.BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"):  # about characters that the font lacks
            figure.savefig(content, dpi=150, format=out.suffix.removeprefix(".").lower() or "png")
    except ValueError as error:
        raise InputError(f"{out}: {error}") from None
    finally:
        pyplot.close(figure)
    write_whole(out, content.getvalue())
