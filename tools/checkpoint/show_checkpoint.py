"""Shows the contents of one checkpoint, for `megalite-inspect-checkpoint show`."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.disk import total_bytes
from megalite_launch.base.texts import scaled
from megalite_tools.checkpoint.checkpoints import choose, find, layout_of, saved_at
from megalite_tools.checkpoint.values import Statistics, statistics
from megalite_tools.terminal import Terminal, bar


def show(options: argparse.Namespace, terminal: Terminal) -> tuple[dict[str, Any], bool]:
    """Prints the checkpoint `options.path`. Returns its facts for JSON, and whether all values read are finite."""
    checkpoint = Checkpoint(find(options.path)[-1])
    names = choose(checkpoint.tensors, options.tensors)
    summary = _summary(checkpoint)
    terminal.line(str(checkpoint.path))
    terminal.facts(_facts(checkpoint, summary))
    values = _read(checkpoint, names) if options.values else {}
    bad = {name for name, found in values.items() if not found.finite}
    terminal.table(
        ["tensor:", "type:", "bytes", *(["norm", "largest"] if values else []), *(["not finite"] if bad else [])],
        [_row(checkpoint, name, values.get(name), bool(bad)) for name in names],
        marked=[number for number, name in enumerate(names) if name in bad],
    )
    if values:
        count = f"{len(bad):,} of {len(values):,} tensors hold values that are not finite"
        terminal.line(count if bad else "all values are finite")
    tensors = [
        {"name": name, **(checkpoint.kind(name) or {}), **(asdict(values[name]) if values else {})} for name in names
    ]
    return {**summary, "tensors": tensors}, not bad


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    progress, rate = checkpoint.progress() or (None, None)
    return {
        "path": str(checkpoint.path),
        "saved": manifest.saved,
        "bytes": total_bytes(manifest.files.values()),
        "files": len(manifest.files),
        "ranks": manifest.ranks,
        "layout": manifest.layout,
        "versions": manifest.versions,
        "progress": None if progress is None else asdict(progress),
        "learning_rate": rate,
        "data": [asdict(source) for source in manifest.data],
        "config": manifest.config,
    }


def _facts(checkpoint: Checkpoint, summary: dict[str, Any]) -> list[tuple[str, str]]:
    manifest = checkpoint.manifest
    saved = [("saved", f"{saved_at(manifest)} UTC")]
    if manifest.foreign:
        told = "" if manifest.resumable else "; there is no progress of a run"
        progress = _progress_facts(summary) if manifest.resumable else []
        saved = [*progress, *saved, ("by", f"another program{told}")]
    else:
        saved = [
            *_progress_facts(summary),
            *saved,
            ("by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
            ("layout", layout_of(manifest)),
            ("ranks", f"{manifest.ranks:,}"),
        ]
    return [
        *saved,
        ("size", f"{len(checkpoint.tensors):,} tensors in {summary['files']:,} files, {scaled(summary['bytes'], 'B')}"),
        *(
            ("data", f"{source.path}: weight {source.weight:g}, {source.tokens:,} tokens, {source.fingerprint[:12]}…")
            for source in manifest.data
        ),
    ]


def _progress_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    progress = summary["progress"]
    left_out = sum(end - first for first, end in progress["left_out"])
    return [
        ("step", f"{progress['step']:,}, {progress['updates']:,} of which changed the weights"),
        ("tokens", f"{progress['tokens']:,}"),
        ("samples", f"{progress['samples']:,}" + (f", {left_out:,} of them left out" if left_out else "")),
        ("learning rate", f"{summary['learning_rate']:.6g}"),
    ]


def _read(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Statistics]:
    found = {}
    with bar("reading", sum(checkpoint.tensors[name].bytes for name in names)) as advanced:
        for name in names:
            found[name] = statistics(checkpoint.read(name))
            advanced(checkpoint.tensors[name].bytes)
    return found


def _row(checkpoint: Checkpoint, name: str, found: Statistics | None, counted: bool) -> tuple[str, ...]:
    row = [name, checkpoint.type(name), f"{checkpoint.tensors[name].bytes:,}"]
    if found is not None:
        row += [f"{found.norm:.4g}", f"{found.largest:.4g}"]
    if found is not None and counted:
        counts = (found.nan, "NaN"), (found.infinite, "infinite")
        row.append(", ".join(f"{count:,} {what}" for count, what in counts if count))
    return tuple(row)
