"""Pictures that programs draw with matplotlib, which need not be installed, on machines that need not have a screen."""

import io
from pathlib import Path
from typing import Any

from megalite.config.errors import InputError
from megalite.config.files import write_whole

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError:
    pyplot = ticker = None  # type: ignore[assignment]

__all__ = ["need_matplotlib", "pyplot", "save", "ticker"]


def need_matplotlib() -> None:
    """Raises InputError where matplotlib is not installed."""
    if pyplot is None:
        raise InputError("matplotlib is not installed; pip install 'megalite[plot]'")


def save(figure: Any, out: Path) -> None:
    """Write a figure in the format that the suffix of `out` says, whole or not at all, and close it.

    Raises InputError where the suffix is no picture's, or the file cannot be written.
    """
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=out.suffix.removeprefix(".").lower() or "png")
    except ValueError as error:
        raise InputError(f"{out}: {error}") from None
    finally:
        pyplot.close(figure)
    write_whole(out, content.getvalue())
