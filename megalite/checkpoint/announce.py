"""Tells an inference server of each export, in a thread of its own: a server that is away stops no training."""

import json
from http.client import HTTPException
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from megalite.checkpoint.store.save_events import NotServed, Served

FIRST_PAUSE, MAX_PAUSE = 0.5, 10.0  # seconds between tries: they double
MIN_TRY = 1.0  # seconds that a try has at the least
LAST_SECONDS = 30.0  # seconds that the end of a run waits for a server at the most
MAX_ANSWER = 1 << 16  # bytes of an answer that are read
MAX_SHOWN = 300  # characters of an answer that are told


class Announcer:
    """Sends the newest export to `url`, and tries again for `timeout` seconds, or until there is a newer export.

    One server request is under way at a time; exports that come meanwhile replace one another. `news` tells outcomes.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        self._changed = Condition()
        self._next: tuple[Path, int] | None = None  # an export that is still to be sent
        self._busy, self._newest = False, 0
        self._news: list[Served | NotServed] = []
        self._thread: Thread | None = None

    def announce(self, folder: Path, step: int) -> None:
        """Have the export `folder` of `step` sent. Returns at once."""
        with self._changed:
            self._next, self._newest = (folder, step), step
            if self._thread is None:
                self._thread = Thread(target=self._run, name="announce", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> list[Served | NotServed]:
        """Return the outcomes that have come since the last call."""
        with self._changed:
            found, self._news = self._news, []
        return found

    def finish(self) -> None:
        """Wait until the newest export is sent or given up, no longer than LAST_SECONDS."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._next is None and not self._busy, LAST_SECONDS):
                where = f"{self.url} has not answered in the last {LAST_SECONDS:g} s of the run"
                self._news.append(NotServed(self._newest, where))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (folder, step), self._next, self._busy = self._next, None, True
            outcome = self._send(folder, step)
            with self._changed:
                self._news.append(outcome)

    def _send(self, folder: Path, step: int) -> Served | NotServed:
        began, pause = monotonic(), FIRST_PAUSE
        while True:
            left = began + self.timeout - monotonic()
            try:
                post(self.url, body_of(self.url, folder, step), max(left, MIN_TRY))
                return Served(step, folder, monotonic() - began)
            except (OSError, HTTPException) as error:
                text = f"{self.url}: {_reason(error)}"
            left = began + self.timeout - monotonic()
            with self._changed:
                if left <= pause or self._changed.wait_for(lambda: self._next is not None, pause):
                    return NotServed(step, text)
            pause = min(2 * pause, MAX_PAUSE)


def body_of(url: str, folder: Path, step: int) -> dict[str, object]:
    """The body of a request: for vLLM's `/collective_rpc` its call, else the fields of SGLang's update from disk."""
    if urlsplit(url).path.rstrip("/").endswith("/collective_rpc"):
        return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return {"model_path": str(folder), "weight_version": str(step)}


def post(url: str, body: dict[str, object], timeout: float) -> None:
    """Send `body` as JSON. Raises OSError or HTTPException unless the server answers with success in time."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST")
    with urlopen(request, timeout=timeout) as answer:
        answer.read(MAX_ANSWER)


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, HTTPError):
        with error:
            text += f": {error.read(MAX_SHOWN).decode(errors='replace')}"
    return " ".join(text.split())[:MAX_SHOWN] or type(error).__name__
