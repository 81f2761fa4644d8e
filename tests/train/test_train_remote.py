"""A run whose data is on a server that stalls."""

from pathlib import Path

import numpy as np
import pytest
from object_server import BUCKET, ObjectServer
from toy_jobs import MODEL, config_of, make, one_rank, saver
from toy_runs import Notes

from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.schema import Remote, Source
from megalite.data.loader import Loader
from megalite.data.samples import Samples
from megalite.data.store_writer import StoreWriter
from megalite.train.loop import Batches, train


def run(prefix: str, remote: Remote, folder: Path) -> Notes:
    samples = Samples([Source(prefix)], 0, MODEL.sequence_length, MODEL.vocab_size, None, remote)
    job, notes = make(config_of(Layout(), MODEL)), Notes()
    with saver(job, folder) as writer:
        train(job, Batches(Loader(samples, 4, 1, 0), None), Progress(), writer, lambda: None, notes)
    return notes


def test_a_stall_is_time_that_a_step_waits_for_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.remote.REQUEST_SECONDS", 0.6)
    with StoreWriter(tmp_path / "store", "uint16") as writer:
        writer.add(np.random.default_rng(0).integers(MODEL.vocab_size, size=20_000))
    remote = Remote(str(tmp_path / "cache"), 0.01, 30)
    with ObjectServer().running() as server, one_rank():
        for suffix in (".bin", ".idx"):
            server.put(f"store{suffix}", (tmp_path / f"store{suffix}").read_bytes())
        expected = run(str(tmp_path / "store"), remote, tmp_path / "local")
        server.faults = {"bin": ["stalled"]}
        found = run(f"s3://{BUCKET}/store", remote, tmp_path / "remote")
    assert found.curve("loss") == expected.curve("loss")
    assert max(found.curve("data_wait_seconds").values()) > 0.6 > max(expected.curve("data_wait_seconds").values())
