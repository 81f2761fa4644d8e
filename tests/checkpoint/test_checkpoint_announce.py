"""Announcing exports to a real HTTP server that works, fails, hangs, is slow or away."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import pytest
import torch
from test_checkpoint_export import config, their_weights
from toy_jobs import advance, make, one_rank, progress_at, saver

from megalite.checkpoint import announce
from megalite.checkpoint.announce import Announcer, body_of
from megalite.checkpoint.store.save_events import NotServed, Saved, Served

FOLDER = Path("/run/export/step-00000002")


@contextmanager
def server(answer: Callable[[dict[str, Any]], int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose status is what `answer` returns for a body. Yields its URL and the bodies it gets."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            self.send_response(answer(body))
            self.end_headers()
            self.wfile.write(b'{"success": true}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/update_weights_from_disk", seen
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "FIRST_PAUSE", 0.02)


def test_a_server_is_sent_what_its_kind_understands() -> None:
    assert body_of("http://host/update_weights_from_disk", FOLDER, 2) == {
        "model_path": str(FOLDER),
        "weight_version": "2",
    }
    assert body_of("http://host:8000/collective_rpc", FOLDER, 2) == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(FOLDER)},
    }


def test_a_failed_request_is_sent_again() -> None:
    statuses = iter([500, 503, 200])
    with server(lambda _: next(statuses)) as (url, seen):
        teller = Announcer(url, 20.0)
        teller.announce(FOLDER, 2)
        teller.finish()
    assert [body["weight_version"] for body in seen] == ["2"] * 3
    (news,) = teller.news()
    assert isinstance(news, Served)
    assert news.step == 2
    assert teller.news() == []


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_goes_on_failing_is_told_with_its_answer(status: int) -> None:
    with server(lambda _: status) as (url, seen):
        teller = Announcer(url, 0.3)
        teller.announce(FOLDER, 2)
        teller.finish()
    (news,) = teller.news()
    assert isinstance(news, NotServed)
    assert f"HTTP Error {status}" in news.error
    assert '{"success": true}' in news.error
    assert len(seen) > 1


def test_a_server_that_is_away_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        teller = Announcer(f"http://127.0.0.1:{unused.getsockname()[1]}/", 0.2)
        teller.announce(FOLDER, 2)
        teller.finish()
    (news,) = teller.news()
    assert isinstance(news, NotServed)
    assert "refused" in news.error


def test_a_newer_export_takes_the_place_of_one_that_waits() -> None:
    """The first hangs up to its timeout, and of those that came meanwhile, the newest alone is sent."""
    free = Event()
    with server(lambda body: 200 if body["weight_version"] != "1" or free.wait(20) else 500) as (url, seen):
        teller = Announcer(url, 3.0)
        began = monotonic()
        teller.announce(FOLDER, 1)
        while not seen:
            assert monotonic() < began + 20
        teller.announce(FOLDER, 2)
        teller.announce(FOLDER, 3)
        assert teller.news() == [], "announcing waits for no server"
        teller.finish()
        free.set()
    assert [body["weight_version"] for body in seen] == ["1", "3"]
    assert [(type(news), news.step) for news in teller.news()] == [(NotServed, 1), (Served, 3)]


def test_the_end_of_a_run_waits_for_a_slow_server_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "LAST_SECONDS", 0.2)
    free = Event()
    with server(lambda _: 200 if free.wait(20) else 500) as (url, _):
        teller = Announcer(url, 20.0)
        teller.announce(FOLDER, 2)
        began = monotonic()
        teller.finish()
        assert monotonic() - began < 5
        free.set()
        (news,) = teller.news()
    assert isinstance(news, NotServed)
    assert "has not answered in the last 0.2 s" in news.error


def test_a_server_loads_every_export_while_training_goes_on(tmp_path: Path) -> None:
    """Each folder that it is sent holds the weights of its step; two are kept, `latest` names the newest."""
    loaded: dict[str, torch.Tensor] = {}

    def load(body: dict[str, Any]) -> int:
        loaded[body["weight_version"]] = their_weights(Path(body["model_path"]))[
            "model.layers.0.self_attn.q_proj.weight"
        ].clone()
        return 200

    expected = {}
    with server(load) as (url, _), one_rank():
        made = config()
        made.checkpoint = replace(made.checkpoint, export_keep=2, export_url=url)
        job = make(made)
        with saver(job, tmp_path / "checkpoints") as writer:
            for step in (2, 4, 6):
                advance(job, step, step + 1)
                expected[str(step)] = (
                    dict(job.named_parameters())["layers.0.attention.q.weight"].full_tensor().detach().clone()
                )
                writer.save(progress_at(job, step))
                writer.finish()
            news = writer.news()
    assert [type(each) for each in news] == [Saved] * 3 + [Served] * 3
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[step], expected[step]) for step in expected)
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert names == ["latest", "step-00000004", "step-00000006"]
    assert (tmp_path / "export/latest").read_text() == "step-00000006\n"


def test_a_run_that_goes_on_announces_what_it_goes_on_from(tmp_path: Path) -> None:
    with server(lambda _: 200) as (url, seen), one_rank():
        made = config()
        job = make(made)
        with saver(job, tmp_path / "checkpoints") as writer:
            writer.save(progress_at(job, 2))
            writer.finish()
        (tmp_path / "export/latest").write_text("step-00000001\n")  # as a kill before it would leave it
        made.checkpoint = replace(made.checkpoint, export_url=url)
        with saver(make(made), tmp_path / "checkpoints") as writer:
            assert writer.export_missing(2) == ()
            writer.finish()
    assert [body["model_path"] for body in seen] == [str(tmp_path / "export/step-00000002")]
    assert (tmp_path / "export/latest").read_text() == "step-00000002\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from megalite.checkpoint.weights import export
from test_checkpoint_export import config
from toy_jobs import make, one_rank, progress_at, saver

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with one_rank():
    job = make(config())
    with saver(job, Path(sys.argv[1]) / "checkpoints") as writer:
        writer.save(progress_at(job, 2))
        writer.finish()
        setattr(export, sys.argv[2], kill)  # in the middle of the next publish
        writer.save(progress_at(job, 4))
        writer.finish()
"""


@pytest.mark.parametrize("moment", ["make_room", "synchronize"])
def test_a_kill_in_a_publish_leaves_only_whole_folders(tmp_path: Path, moment: str) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {folders!r}\n{KILLED}"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path), moment], timeout=120, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    export = tmp_path / "export"
    assert (export / "latest").read_text() == "step-00000002\n"
    whole = [path for path in export.glob("step-*") if path.suffix == ""]
    assert len(whole) == (1 if moment == "make_room" else 2)
    assert all(their_weights(path) for path in whole)
    with one_rank(), saver(make(config()), tmp_path / "checkpoints") as writer:
        assert writer.export_missing(4) == ()
    assert (export / "latest").read_text() == "step-00000004\n"
    assert their_weights(export / "step-00000004")
