"""Saving: what is written is what was staged, and durable before it has its name."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.tensor import DTensor
from toy_jobs import advance, config_of, make, one_rank, parts, progress_at, restorer, saver

from megalite.base.errors import Unhealthy
from megalite.checkpoint.store.files import Writer
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, Source, check_sizes, complete
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.save_events import Outcome, Saved
from megalite.checkpoint.store.state import use_device
from megalite.config import schema
from megalite.config.convert import from_plain
from megalite.config.layout import Layout
from megalite.train.build import Job

SOME = Progress(7, 6, 64, 448, ((8, 16), (40, 48)), 1, (3.25, 3.0, 2.75))


@pytest.fixture
def job() -> Iterator[Job]:
    with one_rank():
        yield make(config_of(Layout()))


def saved(news: list[Outcome]) -> list[int]:
    """The steps of what was saved, all of it."""
    assert all(isinstance(item, Saved) for item in news), news
    return [item.step for item in news]


class Gate:
    """Holds back every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = Writer.write_data

        def held(writer: Writer, *args: object) -> object:
            self.reached.set()
            assert self.opened.wait(60)
            return write(writer, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Writer, "write_data", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_progress_comes_back(job: Job, tmp_path: Path) -> None:
    with saver(job, tmp_path) as writer:
        writer.save(SOME)
        writer.finish()
    assert restorer(job).all(complete(tmp_path)[-1]) == SOME


def test_what_is_written_is_what_was_there_when_saving(job: Job, tmp_path: Path, gate: Gate) -> None:
    """Training goes on while the file is still empty."""
    before = {name: part.values.clone() for name, part in parts_after(job, 1).items()}
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        assert gate.reached.wait(60)
        advance(job, 1, 3)
        gate.opened.set()
    assert not before["embed.weight"].equal(parts(job)["embed.weight"].values)
    restorer(job).all(tmp_path / "step-00000001")
    assert all(part.values.equal(before[name]) for name, part in parts(job).items())


def parts_after(job: Job, steps: int) -> dict:
    advance(job, 0, steps)
    return parts(job)


def test_a_second_save_waits_for_the_first(job: Job, tmp_path: Path, gate: Gate) -> None:
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        assert gate.reached.wait(60)
        assert writer.news() == []
        second = threading.Thread(target=writer.save, args=(progress_at(job, 2),))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert complete(tmp_path) == []
        gate.opened.set()
        second.join(60)
        assert saved(writer.news())[:1] == [1]
    assert [path.name for path in complete(tmp_path)] == ["step-00000001", "step-00000002"]


def test_leaving_waits_until_it_is_durable(job: Job, tmp_path: Path, gate: Gate) -> None:
    opener = threading.Timer(0.3, gate.opened.set)
    opener.start()
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        assert complete(tmp_path) == []
    assert [path.name for path in complete(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize("error", [Unhealthy("all ranks stop"), RuntimeError("a peer is lost")], ids=["all", "one"])
def test_an_error_of_one_rank_does_not_wait_for_the_others(
    job: Job, tmp_path: Path, gate: Gate, error: Exception
) -> None:
    opener = threading.Timer(0.3, gate.opened.set)
    with suppress(type(error)), saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        assert gate.reached.wait(60)
        opener.start()
        raise error
    waited = complete(tmp_path) != []
    opener.join()
    assert waited == isinstance(error, Unhealthy)
    writer._writer.shutdown(wait=True)


def test_without_async_it_is_durable_when_save_returns(job: Job, tmp_path: Path) -> None:
    job.config.checkpoint.async_ = False
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        assert [path.name for path in complete(tmp_path)] == ["step-00000001"]
        assert saved(writer.news()) == [1]


def test_everything_is_flushed_before_the_name_is_given(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, then the folder that names them, then the rename, then the folder that names it."""
    done: list[str] = []
    flush, rename = os.fsync, Path.rename

    def noted_flush(descriptor: int) -> None:
        done.append("flush " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_flush)
    monkeypatch.setattr(Path, "rename", noted_rename)
    folder = tmp_path / "checkpoints"
    with saver(job, folder) as writer:
        writer.save(progress_at(job, 1))
    assert [re.sub(r"(?<=partial\.)\d+", "N", entry) for entry in done] == [
        f"flush {tmp_path.name}",
        "flush __0_0.distcp",
        "flush .metadata.tmp",
        "rename .metadata",
        f"flush {INDEX}",
        f"flush {MANIFEST}",
        "flush step-00000001.partial.N",
        "rename step-00000001",
        "flush checkpoints",
    ]


def test_the_manifest_tells_everything(job: Job, tmp_path: Path) -> None:
    with saver(job, tmp_path) as writer:
        writer.save(SOME)
    manifest = check_sizes(tmp_path / "step-00000007")
    assert (manifest.step, manifest.tokens, manifest.ranks) == (7, 448, 1)
    assert manifest.layout == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    assert manifest.versions["torch"] == version("torch")
    assert manifest.configuration == job.config
    assert from_plain(manifest.config) == (job.config, [])
    here = {path.name for path in (tmp_path / "step-00000007").iterdir()}
    assert here == {*manifest.files, MANIFEST}
    for name, file in manifest.files.items():
        content = (tmp_path / "step-00000007" / name).read_bytes()
        assert (len(content), xxhash.xxh128(content).hexdigest()) == (file.bytes, file.xxh128)


def test_the_manifest_has_no_passwords(job: Job, tmp_path: Path) -> None:
    """Others read checkpoints; who goes on from one gives the URL."""
    path = "http://me:precious@host/store"
    secret = replace(job.config, data=replace(job.config.data, train=[schema.Source(path)]))
    told = Source(path, 1.0, 10, "00ff" * 8)
    with saver(job, tmp_path, config=secret, data=(told,)) as writer:
        writer.save(SOME)
    text = (tmp_path / "step-00000007" / MANIFEST).read_text()
    assert (text.count("http://***@host/store"), "precious" in text) == (2, False)


def test_torch_reads_it(job: Job, tmp_path: Path) -> None:
    """The oracle: `torch.distributed.checkpoint.load`, with torch's own reader."""
    advance(job, 0, 2)
    with saver(job, tmp_path) as writer:
        writer.save(SOME)
    expected = {name: part.values for name, part in parts(job).items()}
    names = {"embed.weight": "model.embed.weight", "embed.weight exp_avg": "optimizer.exp_avg.embed.weight"}
    tensors = {there: torch.zeros_like(expected[here]) for here, there in names.items()}
    scalars = {"progress.step": torch.tensor(0), "schedule.learning_rate": torch.tensor(0.0, dtype=torch.float64)}
    dcp.load(tensors | scalars, checkpoint_id=tmp_path / "step-00000007")
    assert all(tensors[there].equal(expected[here]) for here, there in names.items())
    assert scalars["progress.step"] == 7
    assert scalars["schedule.learning_rate"] == job.optimizer.param_groups[0]["lr"]


def test_saving_leaves_the_job_as_it_was(job: Job, tmp_path: Path) -> None:
    advance(job, 0, 1)
    before = {name: part.values.clone() for name, part in parts(job).items()}
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
    assert all(before[name].equal(part.values) for name, part in parts(job).items())


def test_nothing_is_deleted_before_a_newer_one_is_durable(job: Job, tmp_path: Path, gate: Gate) -> None:
    job.config.checkpoint.keep = 1
    gate.opened.set()
    with saver(job, tmp_path) as writer:
        writer.save(progress_at(job, 1))
        writer.finish()
        gate.opened.clear()
        gate.reached.clear()
        writer.save(progress_at(job, 2))
        assert gate.reached.wait(60)
        assert [path.name for path in complete(tmp_path)] == ["step-00000001"]
        gate.opened.set()
    assert [path.name for path in complete(tmp_path)] == ["step-00000002"]


def test_only_the_gpu_of_this_rank_is_used(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would use the first, which is another rank's; on CPUs none is touched, though there may be some."""
    told: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(
        "megalite.checkpoint.run.save.use_device", lambda device: told.append((device, threading.current_thread().name))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    for in_background in (True, False):
        job.config.checkpoint.async_ = in_background
        with saver(job, tmp_path / str(in_background)) as writer:
            writer.save(progress_at(job, 1))
            writer.finish()
    assert told == [(torch.device("cpu"), "checkpoint_0")] * 2
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cpu"):
        use_device(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_parts_are_saved_in_rows_however_they_lie_in_memory(job: Job, tmp_path: Path) -> None:
    name, param = next((name, param) for name, param in job.named_parameters() if param.ndim == 2)
    param._local_tensor = param._local_tensor.detach().t().contiguous().t()
    assert not param.to_local().is_contiguous()
    before = param.to_local().clone()
    for in_background in (True, False):
        job.config.checkpoint.async_ = in_background
        with saver(job, tmp_path / str(in_background)) as writer:
            writer.save(progress_at(job, 1))
            writer.finish()
        with torch.no_grad():
            param.to_local().zero_()
        restorer(job).all(tmp_path / str(in_background) / "step-00000001")
        assert param.to_local().equal(before), name


def test_staging_memory_is_used_again(job: Job, tmp_path: Path) -> None:
    with saver(job, tmp_path) as writer:
        addresses = []
        for step in (1, 2):
            writer.save(progress_at(job, step))
            writer.finish()
            addresses.append({name: tensor.data_ptr() for name, tensor in writer._staging._copies.items()})
    assert addresses[0] == addresses[1]
    assert len(addresses[0]) == 3 * len(list(job.named_parameters()))
    local = {param.to_local().data_ptr() for _, param in job.named_parameters() if isinstance(param, DTensor)}
    assert not local & set(addresses[0].values())
