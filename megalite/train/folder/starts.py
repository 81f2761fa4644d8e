"""Records every start of a run: `starts/001.json` and so on, and a copy of the tokenizer. Nothing is overwritten.

The configuration of a start is in `starts/NNN.yaml`, and how its code differed from the commit in `starts/NNN.diff`.
With `schedule: auto`, `starts/NNN.schedule.yaml` is the order that was found, as a schedule file. `config.yaml` is the
configuration of the first start.
"""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any

import torch

from megalite.base.files import as_json, exists, read_copied, write_whole
from megalite.base.secrets import command_without_secrets, relevant
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.weights.formats.tokenizer import kept_tokenizer
from megalite.config.identity import digest_of
from megalite.config.load import dump
from megalite.config.schema import Config
from megalite.data.tokenizer import COMPANION_FILES, MAX_COMPANION_BYTES, TEMPLATE_FILE, tokenizer_hash
from megalite.schedule.actions import Table
from megalite.schedule.file import write
from megalite_launch.base.files import PRIVATE_MODE, opened

SOURCE = Path(__file__).parents[3]  # root of the code that runs, where that is a checkout
DIFF_LIMIT = 2**20  # bytes
DRIVER = Path("/proc/driver/nvidia/version")


def record_start(
    folder: Path,
    config: Config,
    devices: Sequence[tuple[str, str]],
    progress: Progress,
    order: Table | None = None,
) -> Path:
    """Write the record of this start into the run folder `folder`. Returns its path. Raises OSError and InputError.

    devices: host and device of every rank. progress: where the run goes on. order: that of
    `schedule: auto`, for steps of `batch.global`.
    """
    text, tokenizer = dump(config), config.data.tokenizer
    record = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_without_secrets(sys.orig_argv),
        "working_directory": os.getcwd(),
        "host": socket.gethostname(),
        "ranks": len(devices),
        "steps": config.train.steps,
        "layout": asdict(config.parallel.layout),
        "devices": _devices(devices),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(sorted(_packages())),
        "environment": relevant(os.environ),
        "commit": _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").decode().strip() or None,
        "configuration_hash": digest_of(text),
        "tokenizer": tokenizer and {"path": tokenizer, "hash": tokenizer_hash(tokenizer)},
        "resumed": _resumed(folder, config, progress),
    }
    path = _create(folder / "starts", as_json(record))
    write_whole(path.with_suffix(".yaml"), text, PRIVATE_MODE)
    if order is not None:
        write_whole(path.with_suffix(".schedule.yaml"), write(order))
    if changes := _changes():
        write_whole(path.with_suffix(".diff"), changes, PRIVATE_MODE)
    if not (folder / "config.yaml").exists():
        write_whole(folder / "config.yaml", text, PRIVATE_MODE)
    if tokenizer is not None:
        keep_tokenizer(Path(tokenizer), folder, path.with_suffix(".tokenizer"))
    return path


def keep_tokenizer(tokenizer: Path, run: Path, later: Path) -> None:
    """Copy a tokenizer, its settings and its chat template into the run folder `run`.

    later: the folder for it if the run folder has another one.
    """
    if (kept := kept_tokenizer(run)) is not None and tokenizer_hash(kept) == tokenizer_hash(tokenizer):
        return
    folder = run / "tokenizer" if kept is None else later
    folder.mkdir(parents=True, exist_ok=True)
    beside = map(tokenizer.with_name, (*COMPANION_FILES, TEMPLATE_FILE))
    for source in (*beside, tokenizer):  # the tokenizer last: where it is, its settings are
        if source is tokenizer:
            write_whole(folder / source.name, source.read_bytes())
        elif exists(source):
            write_whole(folder / source.name, read_copied(source, MAX_COMPANION_BYTES))


def _packages() -> Iterator[tuple[str, str]]:
    """Name and version of everything that is installed. Each description is read once, which takes a millisecond."""
    for found in distributions():
        told = found.metadata
        yield told["Name"], told["Version"]


def _create(folder: Path, text: str) -> Path:
    """Make a file in `folder` whose name is a number that no file has had. It is whole, or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = {path.name.partition(".")[0] for path in folder.iterdir()}
    path = folder / next(f"{number:03d}.json" for number in count(1) if f"{number:03d}" not in taken)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # one job is in a run folder; this holds even if there were two
    with open(opened(path, flags, PRIVATE_MODE), "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise
    return path


def _devices(of_ranks: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Count ranks by host and device."""
    found: dict[str, dict[str, int]] = {}
    for host, device in of_ranks:
        devices = found.setdefault(host, {})
        devices[device] = devices.get(device, 0) + 1
    return found


def _resumed(folder: Path, config: Config, progress: Progress) -> dict[str, Any] | None:
    if progress.step == 0:
        return None
    auto = config.checkpoint.resume == "auto"
    path = folder / f"checkpoints/step-{progress.step:08d}" if auto else config.checkpoint.resume
    return {"step": progress.step, "from": str(path)}


def _driver() -> str | None:
    try:
        return DRIVER.read_text().partition("\n")[0]
    except OSError:
        return None


def _changes() -> bytes:
    """The changes to the code that runs, since its commit."""
    changes = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", "megalite", "kernels")
    cut = f"\n… cut off here: {len(changes):,} bytes in all\n".encode()
    return changes if len(changes) <= DIFF_LIMIT else changes[:DIFF_LIMIT] + cut


def _git(*arguments: str) -> bytes:
    """The output of git for the source tree that runs; empty outside a checkout."""
    if not (SOURCE / ".git").exists():
        return b""
    try:
        command = ["git", "-C", str(SOURCE), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return b""
