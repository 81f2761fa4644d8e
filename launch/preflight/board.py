"""A notice board over TCP, by which the nodes of a preflight find each other and compare clocks.

The first node keeps it. Requests and answers are a line of JSON each. It does not depend on the shared file system,
which is one of the things under test.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from types import TracebackType
from typing import Any, Optional

MAX_LINE_BYTES = 2**16  # bytes of a line
MAX_NOTES = 100_000  # notes
PINGS = 20
ANSWER_SECONDS = 5.0  # seconds that a request may take beyond what it asked to wait


class Unreachable(Exception):
    """The board, or the note that is waited for, did not come in time."""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int) -> None:
        self.notes: dict[str, Any] = {}
        self.changed = threading.Condition()
        super().__init__(("", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that breaks off is none of our business."""


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True  # answers are timed

    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        while True:
            line = self.rfile.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                return
            request = json.loads(line)
            self.wfile.write((json.dumps(self._answer(server, request)) + "\n").encode())

    @staticmethod
    def _answer(server: _Server, request: Any) -> Any:
        if request["do"] == "time":
            return time.time()
        key = str(request["key"])
        with server.changed:
            if request["do"] == "put":
                if len(server.notes) < MAX_NOTES:
                    server.notes[key] = request["value"]
                server.changed.notify_all()
                return True
            server.changed.wait_for(lambda: key in server.notes, min(float(request["wait"]), 600.0))
            return server.notes.get(key)


class Host:
    """Keeps the board while it is entered. Raises OSError if the port is taken; port 0 takes any that is free."""

    def __init__(self, port: int) -> None:
        self._server = _Server(port)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Host:
        self._thread.start()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class Board:
    """A connection to the board."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        """Connects, trying again until `deadline` (of time.monotonic). Raises Unreachable."""
        self._where = f"{host}:{port}"
        while True:
            try:
                self._socket = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise Unreachable(f"{self._where} cannot be reached: {error}") from None
                time.sleep(0.1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def put(self, key: str, value: Any) -> None:
        """Raises Unreachable."""
        self._ask({"do": "put", "key": key, "value": value}, 0.0)

    def get(self, key: str, wait: float) -> Any:
        """A note, as soon as it is there. Raises Unreachable after `wait` seconds."""
        found = self._ask({"do": "get", "key": key, "wait": max(0.0, wait)}, max(0.0, wait))
        if found is None:
            raise Unreachable(f"no {key} after {max(0.0, wait):.0f} s")
        return found

    def clock(self) -> tuple[float, float]:
        """Seconds by which this node's clock is ahead of the board's, and the fastest of some pings' round trips.

        Half of the round trip bounds the error, whatever the way there and back take (Cristian 1989).
        """
        best = (0.0, float("inf"))
        for _ in range(PINGS):
            start, begun = time.time(), time.perf_counter()
            there = float(self._ask({"do": "time"}, 0.0))
            trip = time.perf_counter() - begun
            if trip < best[1]:
                best = (start + trip / 2 - there, trip)
        return best

    def _ask(self, request: Any, wait: float) -> Any:
        try:
            self._socket.settimeout(wait + ANSWER_SECONDS)
            self._socket.sendall((json.dumps(request) + "\n").encode())
            line = self._file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise Unreachable(f"{self._where} gave no answer: {error}") from None
        try:
            return json.loads(line)
        except ValueError:
            raise Unreachable(f"{self._where} gave no answer") from None
