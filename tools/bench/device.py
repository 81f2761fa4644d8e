"""Measure what one GPU can do, in about a minute, and write a cluster file with these figures for the planner.

Measured are copies, matrix products at the sizes of published models, attention by every backend, the loss and AdamW.
On a CPU, `--tiny` rehearses the same code at sizes that mean nothing.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, counted
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_writable, exists, write_object
from megalite.cost.cluster import PRECISIONS, cluster_path, read_cluster
from megalite.cost.gpu_names import cluster_of
from megalite.cost.measured_cluster import write_measured
from megalite_launch.base.arguments import above_zero
from megalite_tools.bench.training.probe import SECONDS, probe
from megalite_tools.bench.training.probe_device import device_name
from megalite_tools.bench.training.probe_figures import ERROR, OMISSION
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-device"
RATES = {"tflops": (1.0, "TFLOP/s"), "bytes_per_s": (1e9, "GB/s"), "ms_per_billion": (1.0, "ms for 1e9 parameters")}
OTHER_COLUMNS = (
    "ms",
    "p10_ms",
    "p90_ms",
    "sizes",
    "precision",
    *RATES,
)  # which the last column of the table leaves out


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code: FAILED if a cluster file is wanted and no product was measured."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    add = parser.add_argument
    add("--out", metavar="FILE.yaml", help="the cluster file to write, which must not be there yet")
    add(
        "--base",
        metavar="CLUSTER",
        help="the cluster, by name or file, whose other figures it takes over (default: by the name of the GPU)",
    )
    add("--json", type=Path, metavar="FILE", help="all figures, written anew after every group")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: a GPU, if there is one)")
    add("--tiny", action="store_true", help="rehearse at tiny sizes")
    add("--seconds", type=above_zero(), default=60.0, help="after which nothing more is begun (default: %(default)g)")
    return parser


def _run(options: argparse.Namespace) -> int:
    device = _device(options)
    name = device_name(device)
    base = _base(options, name)
    if options.json is not None:
        check_writable(options.json)
    found = probe(device, options.tiny, lambda found: _note(found, options.json), options.seconds)
    _show(Terminal(), found)
    if options.out is None:
        return ExitCode.DONE
    figures = cluster_figures(found)
    if figures is None:
        print(f"{COMMAND}: error: no product in bf16 was measured, so {options.out} is not written", file=sys.stderr)
        return ExitCode.FAILED
    write_measured(base, Path(options.out), figures, COMMAND, _where(device, name, options.tiny))
    return ExitCode.DONE


def _device(options: argparse.Namespace) -> torch.device:
    if options.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if options.device == "cuda":
        raise InputError("--device cuda: PyTorch finds no GPU here; use --device cpu --tiny for a rehearsal")
    if not options.tiny:
        raise InputError(f"--device {options.device}: there is only a CPU, which takes hours for this; add --tiny")
    return torch.device("cpu")


def _base(options: argparse.Namespace, name: str) -> str:
    """The cluster that lends its figures, which is checked before anything is measured."""
    if options.out is None:
        return ""
    if not options.out.endswith((".yaml", ".yml")):
        raise InputError(f"--out {options.out}: must end in .yaml")
    if exists(options.out, follow=False):
        raise InputError(f"--out {options.out}: there is such a file already; give another name")
    check_writable(Path(options.out))
    base = options.base or cluster_of(name)
    if base is None:
        raise InputError(f"{name}: no cluster is known with this device; name one that is like it with --base")
    read_cluster(cluster_path(base, "--base "))
    return base


def _where(device: torch.device, name: str, tiny: bool) -> str:
    """The device, for the sources of figures."""
    what = name if device.type == "cuda" else f"a CPU, {name}"
    return f"{what}, at tiny sizes: a rehearsal, whose figures mean nothing" if tiny else f"one {what}"


def cluster_figures(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a probe's figures to those that `write_measured` takes. None if no product in bf16 was measured."""
    best: dict[str, float] = {}
    for _, figure in _measured(found, "gemm", "tflops"):
        if figure["precision"] in PRECISIONS:
            best[figure["precision"]] = max(best.get(figure["precision"], 0.0), figure["tflops"] * 1e12)
    if "bf16" not in best:
        return None
    host = [figure["bytes_per_s"] for _, figure in _measured(found, "host", "bytes_per_s")]
    copies = [figure["bytes_per_s"] for _, figure in _measured(found, "copy", "bytes_per_s")]
    facts = found["device"]
    return {
        "precision": "bf16",
        "matmul": best.pop("bf16"),
        "products": best,
        "host": min(host) if len(host) == 2 else None,
        "copy": max(copies, default=None),
        "name": facts.get("name"),
        "multiprocessors": facts.get("multiprocessors"),
        "memory": facts.get("memory_bytes"),
        "power": facts.get("power_limit"),
    }


def _measured(found: Mapping[str, Any], group: str, rate: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of a group that have a rate, by name."""
    for name, figure in found[group].items():
        if isinstance(figure, dict) and rate in figure:
            yield name, figure


def _note(found: Mapping[str, Any], path: Path | None) -> None:
    """Keep what has been measured so far, and say on stderr which group was the last."""
    if path is not None:
        write_object(path, found)
    name, seconds = list(found[SECONDS].items())[-1]
    text = counted(len(found[name]), "figure")
    failed = sum(isinstance(figure, dict) and ERROR in figure for figure in found[name].values())
    text += f", {failed} of them failed" * bool(failed)
    text = found[name].get(OMISSION, text)
    print(f"{COMMAND}: {name}: {found[name].get(ERROR, text)}; {seconds:.1f} s", file=sys.stderr, flush=True)


def _show(terminal: Terminal, found: Mapping[str, Any]) -> None:
    terminal.facts((key, str(value)) for key, value in found["device"].items() if value is not None)
    rows: list[tuple[str, ...]] = []
    failed: list[int] = []
    for group in [key for key in found if key not in ("device", SECONDS)]:
        for name, figure in found[group].items():
            if name in (ERROR, OMISSION):
                name, figure = "", {name: figure}
            if ERROR in figure:
                failed.append(len(rows))
            rows.append((group, name, *_cells(figure)))
    terminal.table(("group:", "figure:", "ms", "rate", "note:"), rows, failed)


def _cells(figure: Mapping[str, Any]) -> tuple[str, str, str]:
    time = f"{figure['ms']:.4g}" if "ms" in figure else ""
    rate = next((f"{figure[key] / unit:,.4g} {name}" for key, (unit, name) in RATES.items() if key in figure), "")
    words = {ERROR: "failed", OMISSION: "not measured"}
    rest = {words.get(key, key): value for key, value in figure.items() if key not in OTHER_COLUMNS}
    return time, rate, ", ".join(f"{key}: {value}" for key, value in rest.items() if value is not None)


if __name__ == "__main__":
    sys.exit(main())
