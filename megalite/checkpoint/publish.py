"""Publishing a checkpoint in the folder of a run: it is complete by one rename. Only the first rank does so."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megalite.base.errors import InputError
from megalite.base.files import exists, write_whole
from megalite.checkpoint.announce import Announcer
from megalite.checkpoint.store.disk import File, synchronize, total_bytes, write_durably
from megalite.checkpoint.store.manifest import MANIFEST, Manifest
from megalite.checkpoint.store.retain import new_partial, retain, sweep
from megalite.checkpoint.store.save_events import NotServed, Served
from megalite.checkpoint.weights.export import export, export_of, is_due
from megalite.config.schema import Config

LATEST = "latest"  # file beside the exports that holds the name of the newest


class Publisher:
    """Publishes the checkpoints of a run in `folder`, one at a time.

    advanced: called as an export proceeds. check_owner: called before anything in `folder` is renamed or deleted; does
    not return if the folder has become another job's.
    """

    def __init__(
        self, folder: Path, config: Config, advanced: Callable[[], None], check_owner: Callable[[], None]
    ) -> None:
        self.folder, self.config, self.check_owner = folder, config, check_owner
        self._advanced = advanced
        self._told: set[str] = set()  # problems that were told
        checkpoint = config.checkpoint
        url = checkpoint.export_url
        self._announcer = None if url is None else Announcer(url, checkpoint.export_timeout)

    def news(self) -> list[Served | NotServed]:
        """Return what the server of `checkpoint.export_url` has done since the last call."""
        return self._announcer.news() if self._announcer is not None else []

    def finish(self) -> None:
        """Wait a while until the server of `checkpoint.export_url` has the newest export."""
        if self._announcer is not None:
            self._announcer.finish()

    def path_of(self, step: int) -> Path:
        """Path of a step's checkpoint once it is complete."""
        return self.folder / f"step-{step:08d}"

    def make_way(self, final: Path) -> Path:
        """Make room for a checkpoint. Returns the new folder in which it is to be written."""
        self.check_owner()
        if os.path.lexists(final):
            raise FileExistsError(f"{final} is there already")
        sweep(self.folder)  # deletes leftovers; one that cannot be deleted is told when the checkpoint is published
        partial = new_partial(final)
        synchronize(self.folder.parent)
        return partial

    def discard(self, partial: Path) -> None:
        """Delete what was written of a checkpoint. The next save tries again what could not be deleted."""
        with suppress(OSError):
            self.check_owner()
            shutil.rmtree(partial)

    def publish(self, partial: Path, final: Path, manifest: Manifest) -> tuple[int, tuple[str, ...]]:
        """Publish a checkpoint that all ranks have written. Returns its bytes, and new problems that came after it was
        complete."""
        for name, file in manifest.files.items():
            _check_whole(partial / name, file)
        write_durably(partial / MANIFEST, manifest.render())
        synchronize(partial)
        self.check_owner()
        partial.rename(final)
        problems = [problem for problem in self._after(final, manifest.step) if problem not in self._told]
        self._told.update(problems)
        return total_bytes(manifest.files.values()), tuple(problems)

    def _after(self, final: Path, step: int) -> list[str]:
        """Flush the name of a checkpoint, which is complete by now, export it, and delete older ones.

        Returns what has failed.
        """
        try:
            synchronize(self.folder)
        except OSError as error:
            return [f"{final} may not survive a crash of this machine, so nothing older is deleted: {error}"]
        problems = self._export(final, step)
        try:
            self.check_owner()
            checkpoint = self.config.checkpoint
            return problems + retain(self.folder, step, checkpoint.keep, checkpoint.keep_every, checkpoint.at)
        except (OSError, InputError) as error:
            return [*problems, f"{self.folder}: old checkpoints cannot be deleted: {error}"]

    def export_missing(self, step: int) -> list[str]:
        """Export the checkpoint of `step`, if that is due and not done, and announce it. Returns what has failed."""
        final = self.path_of(step)
        return self._export(final, step, anew=False) if exists(final) else []

    def _export(self, final: Path, step: int, anew: bool = True) -> list[str]:
        """Export the checkpoint `final` and announce it, if due. Returns what has failed, or is not as it should be.

        anew: also in place of an export that is there.
        """
        if not is_due(self.config.checkpoint, step, self.config.train.steps):
            return []
        try:
            self.check_owner()
            target = export_of(final)
            problems = list(export(final, self.config, self._advanced)) if anew or not exists(target) else []
            write_whole(target.with_name(LATEST), f"{target.name}\n")
            if self._announcer is not None:
                self._announcer.announce(target.absolute(), step)
            return problems + retain(target.parent, step, self.config.checkpoint.export_keep, every=0)
        except (OSError, InputError) as error:
            return [f"{final} cannot be exported: {error}; megalite-convert can do it later"]


def _check_whole(path: Path, file: File) -> None:
    if not path.is_file() or path.stat().st_size != file.bytes:
        raise OSError(f"{path} is not whole here; do all nodes share this file system?")
