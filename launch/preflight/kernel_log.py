"""Errors of GPUs (Xid) that the kernel has logged since it was started."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from .findings import FAIL, OK, UNCHECKED, WARN, Sheet
from .thresholds import Limits

XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)")
START = "Linux version "  # the first line that a kernel logs
COMMANDS = (["dmesg"], ["journalctl", "-k", "-b", "0", "--no-pager", "-q", "-o", "short-monotonic"])
FILES = tuple(Path("/var/log") / name for name in ("kern.log", "messages", "syslog"))
MAX_TAIL_BYTES = 2**26  # bytes from the end of a file
COMMAND_SECONDS = 2.0  # for a command


def check_xids(sheet: Sheet, limits: Limits, files: tuple[Path, ...] = FILES) -> None:
    """Judge the Xids since boot; says "cannot be read" if this user may read no log."""
    read = _kernel_log(files)
    if read is None:
        text = "cannot be read: neither dmesg, journalctl nor files in /var/log are open to this user"
        sheet.add("Xid since boot", UNCHECKED, None, "", text)
        return
    source, text = read
    found = XID.findall(text)
    fatal, noted = (set(limits.numbers(key)) for key in ("xid_fail", "xid_warn"))
    bad = [(gpu, int(number)) for gpu, number in found if int(number) in fatal]
    mild = [(gpu, int(number)) for gpu, number in found if int(number) in noted]
    result = FAIL if bad else WARN if mild else OK
    shown = sorted(set(bad or mild))
    told = ", ".join(f"Xid {number} on {gpu}" for gpu, number in shown[:6]) or "none that matters"
    rule = f"fail: {sorted(fatal)}, warn: {sorted(noted)}"
    sheet.add("Xid since boot", result, [list(entry) for entry in shown[:20]], rule, f"{told} ({source})")


def _kernel_log(files: tuple[Path, ...]) -> Optional[tuple[str, str]]:
    """Find the kernel's messages since boot: their source and their text; None if there are none."""
    for source, text in _sources(files):
        if "\n" in text:
            return source, text
    return None


def _sources(files: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    for command in COMMANDS:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            yield command[0], done.stdout.decode(errors="replace")
    for path in files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - MAX_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        yield str(path), text[max(0, text.rfind(START)) :]
