"""The interface of trackers."""

from collections.abc import Mapping


class Tracker:
    """Takes what a run reports. All methods do nothing here. Their errors end no run: the first one is told."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take values by name, which hold after `step` optimizer steps."""

    def event(self, step: int, name: str, text: str) -> None:
        """Take what happened to the run at `step`. name: a kind of event that docs/metrics.md lists."""

    def end(self, code: int) -> None:
        """End the tracked run: well with the exit code 0, else as failed. Nothing is reported afterwards."""

    def wait(self, patience: float) -> None:
        """Wait until all is sent, at most `patience` seconds. Raises TimeoutError. Called after `end`."""
