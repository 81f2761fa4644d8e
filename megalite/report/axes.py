"""Logarithmic axes with few, readable numbers."""

from math import ceil, floor, log10
from typing import Any

from megalite.report.pictures import ticker
from megalite.scaling.show import amount_text


def logarithmic(axes: Any, which: str, name: str, text: Any = amount_text) -> None:
    """Make an axis logarithmic; `which` is x or y."""
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}label")(name)
    low, high = getattr(axes, f"get_{which}lim")()
    axis = getattr(axes, f"{which}axis")
    marks = steps(low, high)
    axis.set_major_locator(ticker.FixedLocator(marks))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def steps(low: float, high: float) -> list[float]:
    """About five round values between `low` and `high`, at equal ratios where possible."""
    if not 0 < low < high:
        return []
    decades = log10(high / low)
    powers = range(floor(log10(low)) - 1, ceil(log10(high)) + 1)
    if decades > 4.5:
        every = ceil(decades / 5)
        marks = [10.0**power for power in powers if power % every == 0]
    else:
        few = (1,) if decades > 2.6 else (1, 3) if decades > 1.3 else (1, 2, 3, 5) if decades > 0.6 else None
        if few is None:
            return linear(low, high)
        marks = [digit * 10.0**power for power in powers for digit in few]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def linear(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    power = 10.0 ** floor(log10(rough))
    step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= rough * (1 - 1e-9))
    return [step * at for at in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def flops_text(value: float) -> str:
    """`3e18`."""
    return f"{value:.2g}".replace("e+", "e")
