"""The times that `schedule: auto` is searched for in a run: the same on all ranks, and told."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from order_cases import train_with_clusters
from ranks import Ranks
from toy_jobs import CPU, MODEL, config_of, make, one_rank

from megalite.checkpoint.store.progress import Progress
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.schema import Batch, Config
from megalite.plan.pipeline import micro_batches
from megalite.schedule.file import read
from megalite.train.folder.starts import record_start
from megalite.train.order_costs import cluster_of_run, searched_order


def configured(schedule: str) -> Config:
    """Four stages, the last of which is slow, and twelve micro-batches."""
    model = replace(MODEL, layers=4, vocab_size=1 << 12)
    config = config_of(Layout(pp=4, dp_shard=2), model, schedule)
    config.parallel.pipeline.split = [1, 1, 1, 1]
    return replace(config, batch=Batch(micro=1, global_=24))


def test_ranks_search_for_the_times_of_rank_0_and_train_as_under_any_order(ranks: Ranks) -> None:
    found = ranks.run(train_with_clusters, configured("auto"), ["h100_sxm", "l40s"], 3)
    by_flops = ranks.run(train_with_clusters, configured("auto"), [None], 1)
    named = ranks.run(train_with_clusters, configured("1f1b"), ["h100_sxm"], 3)
    assert {each[:2] for each in found} == {found[0][:2]}
    assert "where stages take the time that is predicted on h100_sxm" in found[0][0]
    assert "where stages take the time of their FLOPs" in by_flops[0][0]
    assert named[0][0] == "schedule 1f1b"
    assert found[0][1] != named[0][1]
    # Other orders lay tensors elsewhere, and some CPUs round products by that.
    torch.testing.assert_close(
        *(torch.tensor([each[2] for each in run], dtype=torch.float64) for run in (found, named)), rtol=1e-14, atol=0
    )


def test_the_cluster_is_the_one_that_is_named_or_that_has_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = Config(), torch.device("cuda")
    named = replace(config, run=replace(config.run, cluster="l40s"))
    names = iter(["NVIDIA H200", "NVIDIA H200 NVL"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    found = [cluster_of_run(config, cuda), cluster_of_run(config, cuda), cluster_of_run(config, CPU)]
    found += [cluster_of_run(named, cuda), cluster_of_run(named, CPU)]
    assert [each and each.name for each in found] == ["h200", None, None, "l40s", "l40s"]


def test_a_start_leaves_its_order_as_a_schedule_file_that_runs(tmp_path: Path) -> None:
    config = replace(config_of(Layout(), schedule="auto"), run=replace(Config().run, dir=str(tmp_path)))
    with one_rank():
        job = make(config)
    order = searched_order(job)
    assert order is not None
    path = record_start(tmp_path, config, [("here", "cpu")], Progress(), order)
    file = path.with_suffix(".schedule.yaml")
    assert read(file).orders == order.orders
    again = load([str(path.with_suffix(".yaml"))], [f"parallel.pipeline.schedule={file}"])
    assert micro_batches(replace(again, parallel=config.parallel)) == read(file).micro_batches
    assert searched_order(replace(job, plan=replace(job.plan, config=config_of(Layout())))) is None
