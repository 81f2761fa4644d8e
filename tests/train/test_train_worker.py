"""What a rank finds out about its device."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from toy_jobs import MODEL, config_of, make, one_rank
from toy_runs import Notebook, Notes

from megalite.base.errors import InputError
from megalite.checkpoint.store.progress import Progress
from megalite.config.identity import same_everywhere
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Context, Parallel, TensorParallel
from megalite.config.schema import Config, Data, Source, Train
from megalite.dry_run.run import fake_world
from megalite.parallel.settled_symmetric import Fused
from megalite.train import worker
from megalite.train.loop import Batches
from megalite.train.report import WARNINGS
from megalite.train.worker import announce, check_attention, outcome, smallest_memory

CUDA = torch.device("cuda")
RING = Config(parallel=Parallel(cp=2), model=Model(head_width=64))
DOCUMENTS = Config(data=Data(mask_documents=True), model=Model(head_width=64))


@pytest.mark.parametrize("config", [RING, DOCUMENTS], ids=["ring", "documents"])
def test_blocks_of_attention_on_cuda_need_what_flash_attention_takes(config: Config) -> None:
    check_attention(config, CUDA)
    with pytest.raises(InputError, match=r"on CUDA needs train\.precision = bf16, not fp64"):
        check_attention(replace(config, train=Train(precision="fp64")), CUDA)
    with pytest.raises(InputError, match="at most 256, not 12 wide"):
        check_attention(replace(config, model=Model(head_width=12)), CUDA)


def test_other_attention_and_the_cpu_take_everything() -> None:
    exact = Train(precision="fp64")
    check_attention(Config(train=exact), CUDA)
    check_attention(replace(RING, train=exact, parallel=Parallel(cp=2, context=Context("ulysses"))), CUDA)
    check_attention(replace(RING, train=exact), torch.device("cpu"))


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (0, "done: 20 steps"),
        (19, "done: 20 steps"),
        (20, "nothing to do: the run stands at step 20 and train.steps = 20; raise train.steps to go on"),
        (40, "nothing to do: the run stands at step 40 and train.steps = 20; raise train.steps to go on"),
    ],
)
def test_a_run_tells_what_it_has_done(first: int, told: str) -> None:
    assert outcome(20, first) == told


@pytest.mark.parametrize(
    ("experts", "event"),
    [(Experts(4, 2, force_balance=True), "experts_in_turn"), (Experts(4, 1), "routers_untaught"), (Experts(4, 2), "")],
)
def test_a_run_tells_of_experts_that_routers_do_not_choose(experts: Experts, event: str) -> None:
    notes = Notes()
    with one_rank():
        job = make(config_of(Layout(), replace(MODEL, experts=experts)))
        announce(notes, job, Batches(Notebook(job), None), Progress())
    assert [name for _, name, _ in notes.events] == [event] * bool(event)
    assert {name for _, name, _ in notes.events} <= set(WARNINGS)


def test_a_run_tells_what_becomes_of_collectives_that_products_are_to_be_fused_with() -> None:
    notes, config = Notes(), config_of(Layout(tp=2))
    auto = replace(config, parallel=replace(config.parallel, tensor=TensorParallel("auto")))
    with fake_world(0, 2):
        job = make(auto)
        announce(notes, job, Batches(Notebook(job), None), Progress())
        on_gpu = replace(job, mesh=replace(job.mesh, device=CUDA), fused=Fused(True))
        announce(notes, on_gpu, Batches(Notebook(job), None), Progress())
    assert [told for told in notes.said if told.startswith("collectives")] == [
        "collectives of tensor parallelism run as with parallel.tensor.overlap = pieces, since a CPU has no symmetric "
        "memory",
        "collectives of tensor parallelism are fused with matrix products, through symmetric memory",
    ]


def test_ranks_have_all_in_common_but_where_a_node_keeps_its_copy_of_the_data() -> None:
    def facts(path: str, weight: float, tokenizer: str) -> dict[str, object]:
        return same_everywhere(Config(data=Data(train=[Source(path, weight)], tokenizer=tokenizer)))

    assert facts("/node1/a", 1.0, "/node1/t") == facts("/node2/a", 1.0, "/node2/t")
    assert facts("a", 1.0, "t") != facts("a", 2.0, "t")
    assert facts("a", 1.0, "t")["data.train[0].weight"] == 1.0
    assert facts("a", 1.0, "t")["model.layers"] == Model().layers


def test_the_host_with_the_least_memory_for_a_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[tuple[str, int]], mine: tuple[str, int]) -> None:
        assert mine[1] > 0
        found[:] = [("large", 900), ("large", 900), ("large", 900), ("small", 400)]

    monkeypatch.setattr(dist, "get_world_size", Mock(return_value=4))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert smallest_memory(torch.device("cpu")) == (900, "the memory of large", 3)
    assert worker.device_memory(torch.device("cpu")) is None
