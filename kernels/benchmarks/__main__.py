"""Time every kernel on a CUDA device, beside torch.compile, eager PyTorch and, where it is installed, Liger.

Every implementation is first compared with a reference in a wider data type; one that disagrees is not timed. Exit code
0: done; 1: a kernel of this package disagrees or fails; 2: bad input, or nothing to run on; 130: interrupted.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from megalite_kernels.backend import HAS_TRITON, INTERPRETED
from megalite_kernels.benchmarks.cases import OPS, cases
from megalite_kernels.benchmarks.inputs import MODELS, TINY, fitting
from megalite_kernels.benchmarks.machine import device_facts, has_cuda, versions
from megalite_kernels.benchmarks.measure import Log, Row, check, measure
from megalite_kernels.benchmarks.report import as_data, page, result_table, summaries, summary_table
from megalite_kernels.benchmarks.timing import Gpu, copied_sizes, copies, copy_bandwidths

PROGRAM = "python -m megalite_kernels.benchmarks"
OUT = "docs/benchmarks/kernels_gpu.json"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    try:
        if obstacle := _obstacle(options.check, options.out):
            print(f"{PROGRAM}: error: {obstacle}", file=sys.stderr)
            return 2
        rows = _check(options.ops) if options.check else _run(options, shlex.join([*PROGRAM.split(), *arguments]))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; what was written has the cases until then", file=sys.stderr)
        return 130
    return 1 if any(row.is_fault for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare on tiny inputs, on any machine; time nothing")
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPS,
        default=list(OPS),
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
        default=OUT,
        metavar="JSON",
        help="result to write; a page goes beside it (default: %(default)s)",
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


def _obstacle(checks: bool, out: Path) -> str:
    """Why this cannot be run here; empty if it can."""
    has_gpu = has_cuda()
    if not HAS_TRITON:
        return "Triton is not installed, and without it there are no kernels; pip install 'triton>=3.6,<3.8'"
    if checks:
        missing = "without CUDA, --check runs the kernels in Triton's interpreter; set TRITON_INTERPRET=1"
        return "" if has_gpu or INTERPRETED else missing
    if not has_gpu:
        return "there is no CUDA device, and nothing is timed without one; --check compares results on any machine"
    if INTERPRETED:
        return "TRITON_INTERPRET is set, and interpreted kernels are not worth timing; unset it"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {out}: its folder cannot be made: {error.strerror}"
    return "" if os.access(out.parent, os.W_OK) else f"--out {out}: its folder cannot be written to"


def _check(ops: Sequence[str]) -> list[Row]:
    device = torch.device("cuda" if has_cuda() and not INTERPRETED else "cpu")
    log = _log()
    rows = [row for case in cases(ops, [TINY]) for row in check(case, device, log)]
    print(f"On {device}" + ("; torch.compile only traces here." if device.type == "cpu" else "."))
    print(result_table(rows), end="")
    return rows


def _run(options: argparse.Namespace, command: str) -> list[Row]:
    log, gpu = _log(), Gpu(torch.device("cuda", 0))
    head = {"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    head |= {"device": device_facts(gpu.device), "versions": versions()}
    bandwidths = copy_bandwidths(gpu, copies(gpu.device, copied_sizes(gpu.free())), options.rounds)
    for name, bandwidth in bandwidths.items():
        log(f"{name}: {bandwidth / 1e9:.0f} GB/s")
    todo = cases(options.ops, [fitting(MODELS[model], gpu.free()) for model in options.models])
    rows: list[Row] = []
    for done, case in enumerate(todo, 1):
        rows += measure(case, gpu, options.rounds, log)
        gpu.free()
        # After every case: a machine may be lent for less time than all take.
        head["cases"] = f"{done} of {len(todo)}"
        _write(options.out, json.dumps(as_data(head, rows, bandwidths), indent=1) + "\n")
        _write(options.out.with_suffix(".md"), page(head, rows, bandwidths))
    print(summary_table(summaries(rows, max(bandwidths.values()))), end="")
    return rows


def _log() -> Log:
    began = time.monotonic()
    return lambda text: print(f"{time.monotonic() - began:4.0f} s  {text}", file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
