"""Prometheus: the numbers of a run in its text format, over HTTP or in a file that node_exporter reads."""

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.exposition import Address, exposed_at
from megalite.train.tracking.tracker import Tracker
from megalite_launch.base.files import SHARED_MODE, write_whole

# Metrics, as docs/metrics.md lists them, by the names of values in records: name, factor to its unit, help.
GAUGES = {
    "loss": ("megalite_loss", 1.0, "Training loss in nats per token, mean of the latest interval."),
    "valid_loss": ("megalite_valid_loss", 1.0, "Validation loss in nats per token."),
    "grad_norm": ("megalite_grad_norm", 1.0, "L2 norm of all gradients before clipping."),
    "learning_rate": ("megalite_learning_rate", 1.0, "Learning rate."),
    "tokens": ("megalite_tokens", 1.0, "Tokens trained on since the run began."),
    "tokens_per_second": ("megalite_tokens_per_second", 1.0, "Tokens per second of the whole job."),
    "tflops_per_device": ("megalite_device_flops_per_second", 1e12, "Model FLOP/s per device."),
    "mfu": ("megalite_mfu_ratio", 1.0, "Model FLOPs utilization, where the peak of the device is known."),
    "step_seconds": ("megalite_step_seconds", 1.0, "Mean time of a step."),
    "data_wait_seconds": ("megalite_data_wait_seconds", 1.0, "Mean time that a step waited for its batch, on rank 0."),
    "peak_memory_bytes": ("megalite_peak_memory_bytes", 1.0, "Peak memory of rank 0."),
}
COUNTED = ("saved", "save_failed", "rollback", "bad_step", "spike", "straggler")  # events that are 0 from the start on


class Prometheus(Tracker):
    """The metrics of one start of a run. Raises OSError where they cannot be offered.

    where: as `log.prometheus` has it. restarts: starts of the run before this one. step, steps: where the run stands,
    and where it ends.
    """

    def __init__(self, where: int | str, run: str, step: int, steps: int, restarts: int) -> None:
        self._library: Any = importlib.import_module("prometheus_client")
        self._library.disable_created_metrics()  # a time beside every counter
        self._run, self._at, self._server = run, exposed_at(where), None
        self._registry: Any = self._library.CollectorRegistry()
        self._gauges = {key: self._gauge(name, told) for key, (name, _, told) in GAUGES.items()}
        self._running = self._gauge("megalite_running", "1 while the run trains, 0 once it has ended.")
        self._reported = self._gauge("megalite_report_timestamp_seconds", "Time of the latest report, since 1970.")
        self._step = self._gauge("megalite_step", "Optimizer steps that have been taken.")
        self._events = self._counter("megalite_events", "Events of this start.", "event")
        for name in COUNTED:
            self._events.labels(run, name)
        self._counter("megalite_restarts", "Starts of the run after its first one.").labels(run).inc(restarts)
        self._gauge("megalite_steps", "Optimizer steps at which the run ends.").labels(run).set(steps)
        self._running.labels(run).set(1)
        self._offer(step)
        if isinstance(self._at, Address):
            self._server, _ = self._library.start_http_server(self._at.port, self._at.host, self._registry)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in GAUGES:
                self._gauges[name].labels(self._run).set(value * GAUGES[name][1])
        self._offer(step)

    def event(self, step: int, name: str, text: str) -> None:
        self._events.labels(self._run, name).inc()
        self._offer(step)

    def end(self, code: int) -> None:
        self._running.labels(self._run).set(0)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._write()

    def _gauge(self, name: str, told: str) -> Any:
        return self._library.Gauge(name, told, labelnames=["run"], registry=self._registry)

    def _counter(self, name: str, told: str, *labels: str) -> Any:
        return self._library.Counter(name, told, labelnames=["run", *labels], registry=self._registry)

    def _offer(self, step: int) -> None:
        self._step.labels(self._run).set(step)
        self._reported.labels(self._run).set(time.time())
        self._write()

    def _write(self) -> None:
        """Replace the file, if one is wanted. The library's own writer would follow a link at a name to be foreseen."""
        if isinstance(self._at, Path):
            write_whole(self._at, self._library.generate_latest(self._registry), SHARED_MODE, durable=False)
