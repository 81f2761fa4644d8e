"""Rates of float32 matrix products on this CPU: by PyTorch's own choice, and by oneDNN.

Each row is a linear layer: its output, and the gradients of its input and of its weight. Both take turns, so that other
load on the machine slows both; the median is shown. `chosen` tells what megalite takes here.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.base.entry import exit_code
from megalite.base.errors import InputError
from megalite.base.files import write_object
from megalite_kernels import products
from megalite_tools.report_file import add_out, header
from megalite_tools.terminal import Terminal

COMMAND = "python -m megalite_tools.bench.products"
LAYERS = ("64x64", "512x512", "512x1376", "1376x512", "1024x2752", "512x32000")  # inputs and outputs
KINDS = ("output", "input gradient", "weight gradient")


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="INxOUT", help=f"default: {' '.join(LAYERS)}")
    parser.add_argument("--tokens", type=int, default=1024, help="rows of the input (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="timed products of each (default: %(default)s)")
    add_out(parser, "products_cpu.json")
    return parser


def _run(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    for option in ("tokens", "rounds"):
        if getattr(options, option) < 1:
            raise InputError(f"--{option}={getattr(options, option)}: must be at least 1")
    if not products.HAS_ONEDNN:
        raise InputError("this PyTorch has no oneDNN to compare with")
    rows = [row for layer in options.layers for row in _measure(*_sizes(layer), options.tokens, options.rounds)]
    report = header(f"{COMMAND} {' '.join(arguments)}".strip())
    report |= {"threads": torch.get_num_threads(), "tokens": options.tokens, "products": rows}
    _show(report)
    write_object(Path(options.out), report)


def _sizes(layer: str) -> tuple[int, int]:
    numbers = layer.split("x")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
        raise InputError(f"--layers={layer}: must be numbers of inputs and outputs, such as {LAYERS[1]}")
    return int(numbers[0]), int(numbers[1])


@torch.no_grad()
def _measure(inputs: int, outputs: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The rates of a layer's three products."""
    x, weight, grad = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    pairs = zip(KINDS, ((x, weight.t()), (grad, weight), (grad.t(), x)), strict=True)
    return [{"layer": f"{inputs}x{outputs}", "product": kind} | _rates(a, b, rounds) for kind, (a, b) in pairs]


def _rates(a: Tensor, b: Tensor, rounds: int) -> dict[str, Any]:
    """FLOP/s of one product, and what is chosen for it."""
    chosen = products.PREFERS_ONEDNN and products.suits(a, b, b.shape[1])
    seconds: dict[str, list[float]] = {"PyTorch": [], "oneDNN": []}
    with patch.object(products, "LEAST_MULTIPLICATIONS", 1):
        for timed in [False, *[True] * rounds]:
            for name, found in seconds.items():
                with patch.object(products, "PREFERS_ONEDNN", name == "oneDNN"):
                    spent = _seconds(lambda: products.matmul(a, b))
                if timed:
                    found.append(spent)
    operations = 2 * a.numel() * b.shape[1]
    rates = {name: operations / statistics.median(found) for name, found in seconds.items()}
    return rates | {"chosen": "oneDNN" if chosen else "PyTorch"}


def _seconds(work: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _show(report: dict[str, Any]) -> None:
    terminal = Terminal()
    terminal.line(
        f"GFLOP/s of float32 products of {report['tokens']:,} tokens; {report['machine']['cpu']}, "
        f"{report['threads']} threads."
    )
    rows = [
        (row["layer"], row["product"], *(f"{row[name] / 1e9:,.0f}" for name in ("PyTorch", "oneDNN")), row["chosen"])
        for row in report["products"]
    ]
    terminal.table(("layer:", "product:", "PyTorch", "oneDNN", "chosen:"), rows)


if __name__ == "__main__":
    sys.exit(main())
