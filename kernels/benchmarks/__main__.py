"""Time every kernel on a CUDA device, beside torch.compile, eager PyTorch and, where it is installed, Liger.

Every implementation is first compared with a reference in a wider data type; one that disagrees is not timed. With
--sweep, kernels are timed with other sizes of their programs instead, beside the sizes that ship. Exit code 0: done; 1:
a kernel of this package disagrees or fails; 2: bad input, or nothing to run on; 130: interrupted.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megalite_kernels.backend import HAS_TRITON, TRITON_INSTALL, USES_INTERPRETER
from megalite_kernels.benchmarks.cases import OPS, cases
from megalite_kernels.benchmarks.inputs import MODELS, TINY_MODEL, fitting
from megalite_kernels.benchmarks.machine import device_facts, has_cuda, versions
from megalite_kernels.benchmarks.measure import Log, Row, check, measure
from megalite_kernels.benchmarks.report import as_data, page, result_table, summaries, summary_table
from megalite_kernels.benchmarks.sweep import SWEEPS, Trial, swept_cases
from megalite_kernels.benchmarks.sweep import check as check_sweep
from megalite_kernels.benchmarks.sweep import measure as measure_sweep
from megalite_kernels.benchmarks.sweep_report import agreement_table, comparison_table, sweep_data, sweep_page
from megalite_kernels.benchmarks.timing import MIN_ROUNDS, Gpu, copied_sizes, copies, copy_bandwidths
from megalite_launch.base.files import SHARED_MODE, write_whole
from megalite_launch.base.texts import record_text

PROGRAM = "python -m megalite_kernels.benchmarks"
OUT = "docs/benchmarks/kernels_gpu.json"
SWEEP_OUT = "docs/benchmarks/kernels_sweep.json"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    options.out = options.out or Path(SWEEP_OUT if options.sweep else OUT)
    options.ops = options.ops or list(SWEEPS if options.sweep else OPS)
    try:
        if obstacle := _obstacle(options):
            print(f"{PROGRAM}: error: {obstacle}", file=sys.stderr)
            return 2
        if options.check:
            rows = _check_sweep(options.ops) if options.sweep else _check(options.ops)
        else:
            run = _sweep if options.sweep else _run
            rows = run(options, shlex.join([*PROGRAM.split(), *arguments]))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; what was written has the cases until then", file=sys.stderr)
        return 130
    return 1 if any(row.is_fault for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare on tiny inputs, on any machine; time nothing")
    parser.add_argument(
        "--sweep", action="store_true", help=f"other sizes of the kernels' programs, of {', '.join(SWEEPS)}"
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPS,
        metavar="OP",
        help=f"some of {', '.join(OPS)} (default: all)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help=f"some of {', '.join(MODELS)} (default: all)",
    )
    parser.add_argument("--rounds", type=_rounds, default=50, help="most rounds of timing (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=_json,
        metavar="JSON",
        help=f"result to write; a page goes beside it (default: {OUT}, or {SWEEP_OUT} with --sweep)",
    )
    return parser


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 2")
    return int(text)


def _json(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json; the page beside it ends in .md")
    return Path(text)


def _obstacle(options: argparse.Namespace) -> str:
    """Return why the benchmarks cannot run here; empty if they can."""
    has_gpu, out = has_cuda(), options.out
    if options.sweep and (others := [op for op in options.ops if op not in SWEEPS]):
        return f"--sweep knows {', '.join(SWEEPS)}, not {', '.join(others)}; leave that out of --ops"
    if not HAS_TRITON:
        return f"Triton is not installed, and without it there are no kernels; {TRITON_INSTALL}"
    if options.check:
        missing = "without CUDA, --check runs the kernels in Triton's interpreter; set TRITON_INTERPRET=1"
        return "" if has_gpu or USES_INTERPRETER else missing
    if not has_gpu:
        return "there is no CUDA device, and nothing is timed without one; --check compares results on any machine"
    if USES_INTERPRETER:
        return "TRITON_INTERPRET is set, and interpreted kernels are not worth timing; unset it"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out}: its folder cannot be made: {error.strerror}"
    return "" if os.access(out.parent, os.W_OK) else f"--out {out}: its folder cannot be written to"


def _check(ops: Sequence[str]) -> list[Row]:
    device, log = _checked_device(), _log()
    rows = [row for case in cases(ops, [TINY_MODEL]) for row in check(case, device, log)]
    print(f"On {device}" + ("; torch.compile only traces here." if device.type == "cpu" else "."))
    print(result_table(rows), end="")
    return rows


def _check_sweep(ops: Sequence[str]) -> list[Trial]:
    device = _checked_device()
    trials = [trial for case in cases(ops, [TINY_MODEL]) for of_pass in check_sweep(case, device) for trial in of_pass]
    print(f"On {device}.")
    print(agreement_table(trials), end="")
    return trials


def _checked_device() -> torch.device:
    return torch.device("cuda" if has_cuda() and not USES_INTERPRETER else "cpu")


def _run(options: argparse.Namespace, command: str) -> list[Row]:
    log, gpu = _log(), Gpu(torch.device("cuda", 0))
    head, bandwidths = _head(command, gpu), _bandwidths(gpu, options.rounds, log)
    todo = cases(options.ops, [fitting(MODELS[model], gpu.free()) for model in options.models])
    rows: list[Row] = []
    for done, case in enumerate(todo, 1):
        rows += measure(case, gpu, options.rounds, log)
        gpu.free()
        # After every case: a machine may be lent for less time than all take.
        head["cases"] = f"{done} of {len(todo)}"
        write_whole(options.out, record_text(as_data(head, rows, bandwidths)), SHARED_MODE)
        write_whole(options.out.with_suffix(".md"), page(head, rows, bandwidths), SHARED_MODE)
    print(summary_table(summaries(rows, max(bandwidths.values()))), end="")
    return rows


def _sweep(options: argparse.Namespace, command: str) -> list[Trial]:
    log, gpu = _log(), Gpu(torch.device("cuda", 0))
    head, bandwidths = _head(command, gpu), _bandwidths(gpu, min(options.rounds, MIN_ROUNDS), log)
    trials: list[Trial] = []
    for case in swept_cases(options.ops, [MODELS[model] for model in options.models], gpu.free()):
        for of_pass in measure_sweep(case, gpu, options.rounds, log):
            trials += of_pass
            write_whole(options.out, record_text(sweep_data(head, trials, bandwidths)), SHARED_MODE)
            write_whole(options.out.with_suffix(".md"), sweep_page(head, trials, bandwidths), SHARED_MODE)
        gpu.free()
    print(comparison_table(trials, max(bandwidths.values())), end="")
    return trials


def _head(command: str, gpu: Gpu) -> dict[str, Any]:
    """The command, the date, the device and the versions of packages."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "date": date, "device": device_facts(gpu.device), "versions": versions()}


def _bandwidths(gpu: Gpu, rounds: int, log: Log) -> dict[str, float]:
    """Bytes per second of every copy."""
    found = copy_bandwidths(gpu, copies(gpu.device, copied_sizes(gpu.free())), rounds)
    for name, bandwidth in found.items():
        log(f"{name}: {bandwidth / 1e9:.0f} GB/s")
    return found


def _log() -> Log:
    began = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began:4.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
