"""Pictures that programs draw with matplotlib, which need not be installed, on machines that need not have a screen."""

import io
import warnings
from pathlib import Path
from typing import Any

from megalite.config.errors import InputError, printable
from megalite.config.files import write_whole

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError:
    pyplot = ticker = None  # type: ignore[assignment]

__all__ = ["need_matplotlib", "plain", "pyplot", "save", "ticker"]


def need_matplotlib() -> None:
    """Raises InputError where matplotlib is not installed."""
    if pyplot is None:
        raise InputError("matplotlib is not installed; pip install 'megalite[plot]'")


def plain(text: str) -> str:
    """A text to be drawn as it is: no mathematics between dollars, and no label that an underscore would hide."""
    text = printable(text.encode(errors="backslashreplace").decode())
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def save(figure: Any, out: Path) -> None:
    """Write a figure in the format that the suffix of `out` says, whole or not at all, and close it.

    Raises InputError where the suffix is no picture's, or the file cannot be written.
    """
    content = io.BytesIO()
    try:
        with warnings.catch_warnings(action="ignore"):  # of characters that the font lacks
            figure.savefig(content, dpi=150, format=out.suffix.removeprefix(".").lower() or "png")
    except ValueError as error:
        raise InputError(f"{out}: {error}") from None
    finally:
        pyplot.close(figure)
    write_whole(out, content.getvalue())
