"""Values of `megalite plan`'s options as people write them: amounts, memory, numbers of GPUs.

Apart from the question itself, so that no other command waits for the planner.
"""

import argparse
import re
from itertools import takewhile

DEFAULT_CLUSTER = "h100_sxm"  # the cluster where none is named
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)([kmbgt]?)", re.IGNORECASE)
MAX_GPUS = 1 << 20
MIN_HALFWAY_GPUS = 16  # GPUs
MAX_AMOUNT = 1e18


def amount(text: str) -> float:
    """A number with a unit of thousands, millions, billions or trillions: `15T`, `300B`, `2.5e12`, `1,000,000`."""
    match = AMOUNT.fullmatch(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip()))  # as commands print numbers
    value = float(match[1]) * UNITS[match[2].lower()] if match else 0.0
    if not 0 < value <= MAX_AMOUNT:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a number above 0, as in 300B or 15T")
    return value


def gpu_counts(text: str) -> list[int]:
    """Parse `64`, some numbers as `32,48,64`, or the range `64-512`: 64, its doubles, the numbers half way, and 512.

    Numbers half way are left out below 16 GPUs, as they would not be whole nodes of eight.
    """
    found: list[int] = []
    if match := re.fullmatch(r"(\d{1,7})-(\d{1,7})", text):
        least, most = int(match[1]), int(match[2])
        if 0 < least <= most:
            doubles = [*takewhile(lambda count: count < most, (least << power for power in range(24)))]
            between = [3 * count // 2 for count in doubles if count >= MIN_HALFWAY_GPUS and count % 2 == 0]
            found = sorted({*doubles, *(count for count in between if count < most), most})
    elif re.fullmatch(r"\d{1,7}(,\d{1,7})*", text):
        found = sorted({int(number) for number in text.split(",")})
    if not found or not 1 <= found[0] <= found[-1] <= MAX_GPUS:
        rule = "must be a number of GPUs, as in 64, several, as in 32,48,64, or a range from few to many, as in 8-512"
        raise argparse.ArgumentTypeError(f"{text!r:.40} {rule}")
    return found
