"""Convert weights between megalite, Hugging Face, Megatron and Meta. It needs
none of them installed, and no GPU.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from megalite.base.entry import exit_code
from megalite.base.errors import InputError, listing
from megalite.base.exit_codes import ExitCode
from megalite.base.files import as_json, check_output, is_folder, write_object
from megalite.base.output import warn
from megalite.checkpoint.store.disk import total_bytes
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import huggingface
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.tokenizer import doubts
from megalite.checkpoint.weights.maps.upcycled import Upcycling
from megalite.checkpoint.weights.read import factors_of
from megalite.checkpoint.weights.sources import STATEFUL_KINDS, open_weights
from megalite.checkpoint.weights.targets import PLANS, Wanted, plan_of
from megalite.checkpoint.weights.upcycle import upcycled
from megalite.config.load import files_and_overrides, load
from megalite.config.model_schema import Model
from megalite.config.sources import KINDS, split_kind
from megalite_launch.base.arguments import byte_size, whole
from megalite_launch.base.texts import scaled
from megalite_tools.checkpoint.compare_weights import TOKENS, difference_of_logits, unequal_tensors
from megalite_tools.terminal import Terminal, bar, print_warning

COMMAND = "megalite-convert"
DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
COUNT = whole(1, 65_536)
EPILOG = "kinds:\n" + "\n".join(
    fill(text, 78, initial_indent=f"  {kind:<14} ", subsequent_indent=" " * 17) for kind, text in KINDS.items()
)


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="KIND:PATH", help="weights to read; KIND may be left out")
    add("--to", dest="target", required=True, metavar="KIND:PATH", help="folder to make, which must not exist yet")
    add("--config", nargs="+", metavar="YAML", help="megatron, meta: the model, for files that do not tell it")
    add("--dtype", choices=DTYPES, default="keep", help="data type of all tensors (default: keep)")
    add("--optimizer", action="store_true", help="take the optimizer's states and the run's progress along")
    add("--merge", action="store_true", help="add an adapter to the weights beside which it was trained")
    add("--base", metavar="KIND:PATH", help="weights beside which an adapter was trained (default: as it says)")
    add(
        "--upcycle",
        nargs="+",
        metavar="KEY=VALUE|YAML",
        help="make experts of a dense model, such as model.experts.count=8",
    )
    add("--upcycle-noise", type=_noise, default=0.0, metavar="STD", help="noise added to experts (default: 0)")
    add("--without-mtp", action="store_true", help="leave out layers of multi-token prediction")
    add("--shard-size", type=byte_size, metavar="SIZE", help="hf: largest file, as in 5GB (default: as before, or 5GB)")
    add("--tp", type=COUNT, default=1, metavar="N", help="megatron: tensor-parallel ranks; meta: files (default: 1)")
    add("--pp", type=COUNT, default=1, metavar="N", help="megatron: pipeline-parallel ranks (default: 1)")
    add("--virtual-stages", type=COUNT, default=1, metavar="N", help="megatron: stages of a rank (default: 1)")
    add("--workers", type=COUNT, default=2, metavar="N", help="files that are written at a time (default: 2)")
    add("--check", action="store_true", help="read both sides again, and compare every tensor and the logits")
    add("--tokens", type=_tokens, metavar="ID,…", help="with --check: ids to compute logits of (default: random ones)")
    add("--json", metavar="FILE", help="write what was done as JSON to FILE too; -: to stdout instead")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.tokens and not options.check:
        raise InputError("--tokens: needs --check, which computes their logits")
    if options.without_mtp and options.optimizer:
        raise InputError("--without-mtp: leaves a part of the model out, so its optimizer's states too; choose one")
    if options.upcycle_noise and not options.upcycle:
        raise InputError(f"--upcycle-noise {options.upcycle_noise:g}: has no meaning without --upcycle")
    torch.set_num_threads(1)  # the workers share the cores
    if options.json not in (None, "-"):
        check_output(Path(options.json))
    terminal = Terminal(quiet=options.json == "-")
    kind, target = _target(options.target)
    if not is_folder(target.absolute().parent):
        raise InputError(f"--to {options.target}: there is no folder {target.absolute().parent}; make it first")
    model = None if options.config is None else load(options.config).model
    found = _opened(options, model)
    _refuse_adapters(found, kind, options)
    if options.upcycle:
        found = _upcycled(found, options)
    elif kind != "megalite":
        found = found.folded()
    dtype = DTYPES[options.dtype]
    wanted = Wanted(dtype, options.shard_size, options.workers, options.tp, options.pp, options.virtual_stages)
    plan = plan_of(kind, found, target, wanted)
    for doubt in doubts(found, huggingface.model_type(found) if kind == "hf" else None):
        print_warning(COMMAND, doubt)
    request = {"to": kind, **vars(wanted), "files": wanted.files if kind == "megalite" else None}
    request["optimizer"] = options.optimizer
    if found.upcycling is not None:
        request["upcycle"] = [found.upcycling.noise, found.upcycling.seed]
        _tell_of_upcycling(found.upcycling, terminal)
    began = time.monotonic()
    with bar(target.name, sum(output.bytes for output in plan.outputs)) as advanced:
        source = factors_of(found) if kind == "peft" else found
        written = convert(source, plan, target, request, options.workers, advanced)
    seconds = time.monotonic() - began
    size = total_bytes(each.file for each in written.values())
    now = total_bytes(each.file for each in written.values() if not each.earlier)
    added = "" if found.merging is None else f" + {found.merging.factors.path}"
    terminal.line(
        f"{found.kind}:{found.path}{added} → {kind}:{target}: {scaled(size, 'B')} in {len(written)} files, "
        + (f"{scaled(now, 'B')} of them now, " if now < size else "")
        + f"{seconds:.1f} s, {scaled(now / max(seconds, 1e-9), 'B')}/s"
    )
    if found.trained and not options.optimizer and kind in STATEFUL_KINDS:
        terminal.line("left out: the optimizer's states and the run's progress; --optimizer takes them along")
    poisoned = [name for each in written.values() for name in each.poisoned]
    if poisoned:
        shown = listing([*poisoned[:5], *[f"{len(poisoned) - 5} more"] * (len(poisoned) > 5)], "and")
        warn(f"{found.path}: NaN or infinity is in {shown}; a model with such weights computes nothing else")
    report: dict[str, Any] = {
        "from": f"{found.kind}:{found.path}",
        "to": f"{kind}:{target}",
        "bytes": size,
        "bytes_now": now,  # size, less what an earlier attempt wrote
        "seconds": seconds,
        "not_finite": poisoned,
        "files": {name: {"bytes": each.file.bytes, "xxh128": each.file.xxh128} for name, each in written.items()},
    }
    well = True
    if options.check:
        report["check"], well = _check(f"{kind}:{target}", options, terminal, dtype)
    if options.json == "-":
        Terminal().text(as_json(report).rstrip("\n"))
    elif options.json is not None:
        write_object(Path(options.json), report)
    return ExitCode.DONE if well else ExitCode.FAILED


def _opened(options: argparse.Namespace, model: Model | None) -> Weights:
    found = open_weights(options.source, model, options.optimizer, options.base)
    return found.without_mtp() if options.without_mtp else found


def _refuse_adapters(found: Weights, kind: str, options: argparse.Namespace) -> None:
    """Raises InputError for an adapter that is neither merged nor written as one, and for what is none."""
    if found.merging is None and (options.merge or kind == "peft"):
        raise InputError(f"--from {options.source}: has no adapter; leave --merge out, and take another kind than peft")
    if found.merging is not None and options.merge == (kind == "peft"):
        fix = "leave --merge out" if options.merge else "say --merge to add it to its base, or --to peft:PATH"
        raise InputError(f"--from {options.source}: is an adapter; {fix}")


def _upcycled(found: Weights, options: argparse.Namespace) -> Weights:
    config = load(*files_and_overrides(options.upcycle), found.folded().model)
    return upcycled(found, config.model, options.upcycle_noise, config.run.seed)


def _tell_of_upcycling(way: Upcycling, terminal: Terminal) -> None:
    """Say before anything is written what experts will be, and whether the model will compute the same."""
    copies = f"{way.experts.count} experts of a layer are {way.experts.count // way.slices} copies of its feed-forward"
    less = f" but for {way.shared} features, which are the shared expert's" * (way.shared > 0)
    terminal.line(f"upcycle: {copies}{less}" + f", of {way.slices} slices each" * (way.slices > 1))
    if reasons := list(way.inexact()):
        warn(f"--upcycle: the logits will not be those of the source: {'; '.join(reasons)}")
    else:
        terminal.line("upcycle: the logits are those of the source, but for rounding")


def _check(target: str, options: argparse.Namespace, terminal: Terminal, dtype: str | None) -> tuple[Any, bool]:
    """Compare the weights at `target` with the source: tensors bit by bit, and logits. Returns the result for JSON, and
    whether all tensors are equal and the logits finite."""
    given = None if options.config is None else load(options.config).model
    source = _opened(options, given)
    base = f"{source.kind}:{source.path}" if target.startswith("peft:") else None
    made = open_weights(target, states=options.optimizer, base=base)
    if options.upcycle:
        alike = _upcycled(source, options)
    else:
        alike = source if made.kind == "megalite" else source.folded()
    pairs = [(alike, made, dtype)]
    if (
        options.optimizer and made.kind != "megalite"
    ):  # weights that the optimizer updates are in float32, whatever those beside are in
        pairs = [(alike, made, "float32"), (alike.without_states(), open_weights(target), dtype or source.dtype)]
    with bar("comparing", sum(other.bytes for _, other, _ in pairs)) as advanced:
        unequal = [name for one, other, kind in pairs for name in unequal_tensors(one, other, kind, advanced)]
    count = sum(len(other.index.tensors) for _, other, _ in pairs)
    said = f"{count - len(unequal)} of {count} tensors are the same to the bit"
    terminal.line(f"check: {said}" + (f"; not {listing(unequal[:5], 'and')}" if unequal else ""))
    result: dict[str, Any] = {"tensors": count, "unequal": unequal}
    found = difference_of_logits(source, made, options.tokens)
    if found is None:
        terminal.line("check: this machine's memory is too small to compare logits")
    else:
        which = "these" if options.tokens else f"{TOKENS} random"
        terminal.line(f"check: logits of {which} tokens differ by {found:.3g} of the largest at most")
    finite = found is None or math.isfinite(found)
    return result | {"logits": found if finite else None}, not unequal and finite


def _target(text: str) -> tuple[str, Path]:
    """The kind and the path of a folder to be made."""
    kind, path = split_kind(text)
    if kind is None or kind not in PLANS:
        raise InputError(f"--to {text}: say the kind, as in hf:{text}; known are {listing(list(PLANS), 'and')}")
    if not path.name:
        raise InputError(f"--to {text}: names no folder")
    return kind, path


def _noise(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a number from 0 to 1")
    return found


def _tokens(text: str) -> list[int]:
    ids = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in ids):
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be ids with commas between them, as 1,15,7")
    return [int(word) for word in ids]


if __name__ == "__main__":
    sys.exit(main())
