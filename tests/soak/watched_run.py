"""`megalite-status` beside a run that faults befall: it must not fail, and its accounts must add up."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from megalite_launch.base.run_folder import RunFolder

STATUS = str(Path(sys.executable).with_name("megalite-status"))
PATIENCE = 60.0


class Follower:
    """Follows a run with `--follow`, and with `--follow --html`, again and again where they say that it is over.

    A context manager that leaves no process behind. `check` raises SystemExit for anything wrong.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.page = run, run.with_name("followed.html")
        self.starts, self.wrong, self.lines = 0, list[str](), 0
        self._over = threading.Event()
        self._ways = ([], ["--html", str(self.page)])
        self._threads = [threading.Thread(target=self._follow, args=(way,)) for way in self._ways]

    def __enter__(self) -> "Follower":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, way: list[str]) -> None:
        while not self._over.wait(0.5):
            if not RunFolder(self.run).events.exists():
                continue
            command = [STATUS, str(self.run), "--follow", *way]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                told = threading.Thread(target=self._count, args=(process.stdout,))
                told.start()
                while process.poll() is None and not self._over.wait(0.1):
                    pass
                ended_by_us = process.poll() is None
                process.kill()
                told.join()
                said = process.stderr.read() if process.stderr else ""
                if said or (process.returncode and not ended_by_us):
                    self.wrong.append(f"{command} ended with {process.returncode}: {said}")
            self.starts += 1

    def _count(self, lines: Iterator[str]) -> None:
        for _ in lines:
            self.lines += 1

    def check(self) -> None:
        """Once the run is over."""
        deadline = time.monotonic() + PATIENCE
        text = ""
        while not text.rstrip().endswith("</html>") and time.monotonic() < deadline:
            time.sleep(0.5)
            text = self.page.read_text() if self.page.exists() else ""
        self._over.set()
        done = subprocess.run([STATUS, str(self.run), "--json"], capture_output=True, text=True, timeout=PATIENCE)
        found = json.loads(done.stdout)
        if self.wrong or not text or not self.lines or done.stderr:
            raise SystemExit(
                f"faults: megalite-status: {self.wrong} {done.stderr}, {self.lines} lines, page {len(text)}"
            )
        if abs(sum(found["accounts"].values()) - found["wall"]) > 1e-3 or min(found["accounts"].values()) < 0:
            raise SystemExit(f"faults: accounts {found['accounts']} are not {found['wall']} s in all")
        if found["step"] < RunFolder(self.run).newest_step() or not found["over"]:
            raise SystemExit(f"faults: megalite-status says step {found['step']}, {found['text']}")
