"""TensorBoard's files, written record by record in the thread that reports."""

import importlib
import io
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.base.output import append
from megalite.train.folder.records import RETURN_EVENTS
from megalite.train.tracking.tracker import Tracker

PROTO = "tensorboard.compat.proto"
VERSION = "brain.Event:2"  # files that take records back by a session log


class Board(Tracker):
    """An event file in `folder`.

    Methods raise OSError. TensorBoard is imported by name, so that only the reporting rank waits for that.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}"
        self._event, self._summary, self._tensor, self._shape = (
            importlib.import_module(f"{PROTO}.{name}_pb2") for name in ("event", "summary", "tensor", "tensor_shape")
        )
        self._frame: Any = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._purge: int | None = None  # first of the steps whose records so far are to be taken back

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to every curve."""
        value = self._summary.Summary.Value
        self._add(step, [value(tag=name, simple_value=number) for name, number in values.items()])

    def event(self, step: int, name: str, text: str) -> None:
        """Add a text. If it says that the run went back, points of later steps no longer count."""
        if name in RETURN_EVENTS:
            self._purge = step + 1 if self._purge is None else min(step + 1, self._purge)
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        shape = self._shape.TensorShapeProto(dim=[self._shape.TensorShapeProto.Dim(size=1)])
        tensor = self._tensor.TensorProto(
            dtype="DT_STRING", string_val=[text.encode(errors="backslashreplace")], tensor_shape=shape
        )
        metadata = self._summary.SummaryMetadata(plugin_data=plugin)
        self._add(step, [self._summary.Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        event, records = self._event.Event, []
        if not self.path.exists():
            records.append(event(file_version=VERSION))
        if self._purge is not None:
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            records.append(event(step=self._purge, session_log=log))
        records.append(event(step=step, summary=self._summary.Summary(value=values)))
        framed = io.BytesIO()
        for record in records:
            record.wall_time = time.time()
            self._frame(framed).write(record.SerializeToString())
        append(self.path, framed.getvalue())
        self._purge = None
