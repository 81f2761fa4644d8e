"""A server of objects that speaks S3, with moto's implementation, and faults put between it and its clients."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import boto3
from fsspec import get_filesystem_class
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "stores"


class ObjectServer:
    """A server of one bucket. Faults name how the next answers go wrong."""

    def __init__(self) -> None:
        self._application = DomainDispatcherApplication(create_backend_app)
        self.faults: dict[str, list[str]] = {}  # of ranged reads, by suffix; and of "facts of SUFFIX"
        self.stall = 1.0  # seconds
        self.reads = Counter[str]()  # ranged reads, by suffix of the object
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        suffix = environ["PATH_INFO"].rpartition(".")[2]
        ranged = environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ
        with self._lock:
            self.reads[suffix] += ranged
            faults = self.faults.get(suffix if ranged else f"facts of {suffix}")
            fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        if fault == "stalled":
            time.sleep(self.stall)
        kept: list[Any] = []
        body = b"".join(self._application(environ, lambda status, headers, _=None: kept.extend((status, headers))))
        status, headers = kept
        if fault == "short":
            body = body[: len(body) // 2]
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        if fault == "cut off":  # fewer bytes than announced
            body = body[: len(body) // 2]
        if fault == "wrong":
            body = bytes([body[0] ^ 1]) + body[1:]
        start_response(status, headers)
        return [body]

    def put(self, name: str, content: bytes) -> None:
        boto3.client("s3").put_object(Bucket=BUCKET, Key=name, Body=content, ACL="public-read")

    @contextmanager
    def running(self) -> Iterator["ObjectServer"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        settings = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # s3fs and megalite try again themselves
        }
        get_filesystem_class("s3").clear_instance_cache()  # one of an earlier server would ask at its address
        try:
            with patch.dict(os.environ, settings):
                boto3.client("s3").create_bucket(Bucket=BUCKET)
                yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
