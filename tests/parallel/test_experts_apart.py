"""Layers whose experts ranks share out train in every layout as in one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from toy_jobs import Parts, advance, make, parts

from megalite.commands.verify import Difference, compare, random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Buffers, DataParallel, ExpertParallel, Parallel, Pipeline
from megalite.config.rules.validate import validate
from megalite.config.schema import Batch, Config, Optim, Train
from megalite.model import router
from megalite.parallel import experts as products
from megalite.parallel.dispatch import Dispatch, Exchange
from megalite.parallel.experts import Rows
from megalite.parallel.gathered import Gathered
from megalite.train.step import gradients

GATED = {"shared_width": 6, "shared_gate": True}
KINDS = {
    "softmax": Experts(8, 2, 7, first_dense=1, balance_loss=0.1, z_loss=0.01),
    "sigmoid": Experts(8, 3, 9, scores="sigmoid", every=2, scale=1.5, balance_loss=0.2),  # stages without experts
    "groups": Experts(
        8, 3, 9, first_dense=1, scores="sigmoid", groups=4, active_groups=2, correction_rate=0.05, **GATED
    ),
    # FSDP2 shards other dimensions than experts: three of a rank, or one, are not shared out evenly.
    "three": Experts(6, 2, 7, gate="clamped", biases=True, balance_loss=0.1),
    "one": Experts(2, 1, 8, scores="sigmoid", correction_rate=0.05, z_loss=0.01),
    "biases": Experts(8, 3, 6, scores="sigmoid", gate="clamped", biases=True, shared_width=16, shared_gate=True),
    "single": Experts(8, 1, 7, balance_loss=0.1),
    "many": Experts(64, 2, 5, normalize=False, balance_loss=0.1, z_loss=0.02),  # most have no token of a micro-batch
}
CASES = [  # ranks along ep, layout, mode of data parallelism, schedule, experts, recompute, optimizer
    (2, Layout(dp_shard=2), "ddp", "1f1b", "softmax", "none", "adamw"),
    (2, Layout(tp=2), "zero1", "1f1b", "many", "full", "muon"),
    (4, Layout(dp_shard=2, tp=2), "zero1", "1f1b", "groups", "none", "muon"),
    (4, Layout(dp_shard=4, cp=2), "zero3", "1f1b", "softmax", "none", "adamw"),
    (8, Layout(dp_shard=2, cp=2, tp=2), "zero2", "1f1b", "many", "selective", "adamw"),
    (2, Layout(dp_replicate=2, dp_shard=2, tp=2), "zero3", "1f1b", "softmax", "full", "muon"),
    (4, Layout(dp_replicate=2, dp_shard=4), "zero2", "1f1b", "sigmoid", "none", "adamw"),
    (2, Layout(pp=2, dp_shard=4), "ddp", "zbv", "sigmoid", "none", "adamw"),
    (2, Layout(pp=2, dp_shard=4), "zero2", "zb_h1", "groups", "selective", "muon"),
    (4, Layout(pp=2, cp=2, tp=2), "zero1", "dualpipev", "groups", "full", "adamw"),
    (2, Layout(pp=2, dp_shard=2, tp=2), "zero3", "dualpipev", "sigmoid", "none", "muon"),
    (2, Layout(pp=2, dp_shard=2, cp=2), "zero3", "zbv", "many", "full", "adamw"),
    (2, Layout(dp_shard=8), "zero3", "1f1b", "three", "none", "muon"),
    (2, Layout(dp_replicate=2, dp_shard=2, tp=2), "zero2", "1f1b", "one", "full", "adamw"),
    (2, Layout(pp=2, dp_shard=2, cp=2), "zero1", "zbv", "one", "selective", "muon"),
    (2, Layout(pp=2, dp_shard=2, tp=2), "zero3", "dualpipev", "three", "none", "adamw"),
]
WORST_CASES = [  # the same with buffers of a fixed size
    (2, Layout(dp_shard=2), "ddp", "1f1b", "softmax", "selective", "muon"),
    (4, Layout(dp_shard=2, tp=2), "zero1", "1f1b", "groups", "full", "adamw"),
    (4, Layout(dp_shard=4, cp=2), "zero3", "1f1b", "biases", "none", "adamw"),
    (8, Layout(dp_shard=2, cp=2, tp=2), "zero2", "1f1b", "many", "none", "muon"),
    (8, Layout(dp_shard=8), "zero1", "1f1b", "biases", "full", "adamw"),
    (2, Layout(pp=2, dp_shard=4), "zero2", "zb_h1", "groups", "selective", "adamw"),
    (4, Layout(pp=2, cp=2, tp=2), "zero1", "dualpipev", "groups", "none", "muon"),
    (2, Layout(pp=2, dp_shard=2, tp=2), "zero3", "zbv", "sigmoid", "full", "adamw"),
]


def configuration(case: tuple, buffers: Buffers) -> Config:
    ep, layout, mode, schedule, kind, recompute, optimizer = case
    return Config(
        model=Model(2 if layout.pp == 1 else 4, 12, 2, 2, None, 20, 40, 16, experts=KINDS[kind], init_std=0.2),
        parallel=Parallel(
            *layout.shape, ep, Pipeline(schedule), data=DataParallel(mode), experts=ExpertParallel(buffers)
        ),
        batch=Batch(1, layout.dp * (2 if layout.pp == 1 else 4)),
        train=Train(3, "fp64", recompute=recompute),
        optim=Optim(optimizer, lr=0.01, weight_decay=0.3, clip_norm=0.01),
    )


@pytest.mark.parametrize(
    ("case", "buffers"),
    [*((case, "exact") for case in CASES), *((case, "worst_case") for case in WORST_CASES)],
    ids=lambda each: each if isinstance(each, str) else ", ".join(map(str, each)),
)
def test_training_is_that_of_one_process(case: tuple, buffers: Buffers, ranks: Ranks) -> None:
    config = configuration(case, buffers)
    assert validate(config, config.parallel.layout.world_size) == []
    told = ranks.run(compare, config, 2, 1e-11)  # losses and norms must then agree to 1e-13, gradients to 1e-12
    assert [difference for difference in told[0] if not difference.passed] == []


PAIRED = Config(
    model=Model(8, 12, 2, 2, None, 20, 40, 16, experts=KINDS["groups"], init_std=0.2),
    parallel=Parallel(2, 1, 4, 1, 1, 2, Pipeline("dualpipev"), data=DataParallel("zero1")),
    batch=Batch(1, 4 * 6),
    train=Train(2, "fp64"),
    optim=Optim(lr=0.01, weight_decay=0.3, clip_norm=0.01),
)


def trained(config: Config) -> tuple[list[float], Parts, list[str]]:
    """Losses and weights of two steps, and the order in which exchanges of the last were begun and awaited."""
    job, order = make(config), []
    began, ended = Exchange.begin, Exchange.end

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made = function(*args, **options)
            order.append(f"{what} {job.activity.now[0].item}")
            return made

        return call

    losses = advance(job, 0, 1)
    with (
        patch.object(Exchange, "begin", noted("begin", began)),
        patch.object(Exchange, "end", noted("end", ended)),
    ):
        losses += advance(job, 1, 2)
    return losses, parts(job), order


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_exchanges_of_a_pass_run_beside_compute_of_another(recompute: str, ranks: Ranks) -> None:
    """Nothing changes by it, to the last bit."""
    config = replace(PAIRED, train=replace(PAIRED.train, recompute=recompute))
    alone = replace(config, parallel=replace(config.parallel, pipeline=Pipeline("dualpipev", overlap=False)))
    for ours, theirs in zip(ranks.run(trained, config), ranks.run(trained, alone), strict=True):
        assert ours[0] == theirs[0]
        assert all(part.values.equal(theirs[1][name].values) for name, part in ours[1].items())
        # Alone, what has begun is awaited next. In turns, the other pass ends and begins one of its own before.
        assert sorted(ours[2]) == sorted(theirs[2])
        crossed, none = (
            sum(
                first.startswith("begin") and second != first.replace("begin", "end")
                for first, second in pairwise(order)
            )
            for order in (ours[2], theirs[2])
        )
        assert none == 0
        assert crossed > len(ours[2]) / 8


def compared_where_all_choose(first: int, config: Config) -> list[Difference]:
    """Comparison of layout and process where all tokens choose experts from number `first` on, and no other."""

    def chosen(values: Tensor, count: int) -> Tensor:
        return torch.arange(first, first + count).expand(*values.shape[:-1], -1).contiguous()

    with patch.object(router, "best", chosen), noise_in_empty_tensors():
        return compare(config, 2, 1e-11)


@contextmanager
def noise_in_empty_tensors() -> Iterator[None]:
    """Let memory that nothing was written to be NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("ep", "kind", "first"), [(2, "groups", 0), (4, "softmax", 3), (8, "single", 7)])
@pytest.mark.parametrize("buffers", ["exact", "worst_case"])
def test_all_tokens_choose_the_same_experts(ep: int, kind: str, first: int, buffers: Buffers, ranks: Ranks) -> None:
    """So other ranks have no rows, and buffers are as full as can be."""
    config = configuration((ep, Layout(dp_shard=ep // 2, tp=2), "zero2", "1f1b", kind, "selective", "adamw"), buffers)
    told = ranks.run(compared_where_all_choose, first, config)
    assert [difference for difference in told[0] if not difference.passed] == []


def exchanged(
    choices: list[list[list[int]]], buffers: Buffers, known: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What two ranks make of tokens that choose so among four experts, of which expert e multiplies by e + 1.

    known: rows of each expert, where the host knows them, as with choices in turn. Returns the results, gradients of
    tokens, and the numbers of rows that came to the rank's experts.
    """
    group, _ = dist.new_subgroups(2)
    rank = group.rank()
    experts = torch.tensor(choices[rank])
    x = (torch.arange(3 * len(experts), dtype=torch.float64).view(-1, 3) + 100 * rank).requires_grad_()
    dispatch: Dispatch | Gathered
    if buffers == "exact":
        dispatch = Dispatch(Rows(experts, 4, known), group)
    else:
        dispatch = Gathered(experts, 4, group, Rows.spread, known)
        assert dispatch.chosen.tolist() == [int((experts == expert).sum()) for expert in range(4)]  # of this rank alone

    def compute(taken: Tensor, scores: Tensor, mine: Rows) -> Tensor:
        factors = torch.full((len(taken), 1), torch.nan, dtype=torch.float64)  # NaN where there is no row
        factors[: sum(mine.counts), 0] = torch.arange(2 * rank + 1.0, 2 * rank + 3).repeat_interleave(
            torch.tensor(mine.counts)
        )
        return taken * factors * scores[:, None]

    dispatch.send(x, torch.ones(experts.shape, dtype=torch.float64))
    y = dispatch.compute(compute)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, torch.tensor(dispatch.rows.counts)


@pytest.mark.parametrize(
    ("choices", "known"),
    [
        ([[[0, 3], [2, 1], [3, 0]], [[1, 2], [0, 1], [2, 3]]], None),
        ([[[0, 1]] * 3, [[1, 0]] * 3], None),  # all to one rank: nothing goes to the other
        ([[[3], [3], [3]], [[3], [3], [3]]], None),  # all to one expert
        ([[[0, 1], [2, 3], [0, 1]]] * 2, [2, 2, 1, 1]),
    ],
    ids=["mixed", "one rank", "one expert", "in turn"],
)
@pytest.mark.parametrize("buffers", ["exact", "worst_case"])
def test_rows_reach_their_experts_and_come_back(
    choices: list[list[list[int]]], known: list[int] | None, buffers: Buffers, ranks: Ranks
) -> None:
    told = ranks.run(exchanged, choices, buffers, known)[:2]
    for rank, (y, grad, _) in enumerate(told):
        sums = torch.tensor([sum(expert + 1 for expert in token) for token in choices[rank]], dtype=torch.float64)
        x = torch.arange(9, dtype=torch.float64).view(-1, 3) + 100 * rank
        assert y.equal(x * sums[:, None])
        assert grad.equal(sums[:, None].expand(3, 3))
    flat = [expert for rank in choices for token in rank for expert in token]
    assert torch.cat([counts for _, _, counts in told]).tolist() == [flat.count(expert) for expert in range(4)]


def norms(config: Config) -> tuple[Tensor, Tensor]:
    """The squares of the gradients' norm, as all ranks count it, and of whole gradients, put together."""
    job = make(config)
    gradients(job, random_batch(job, 0))
    counted = job.gradients.counted_norms()[1].double().square().sum()
    dist.all_reduce(counted)
    whole = [param.grad.full_tensor() for _, param in job.named_parameters() if isinstance(param.grad, DTensor)]
    return counted, torch.stack([grad.square().sum() for grad in whole]).sum()


def test_the_norm_counts_every_element_of_experts_once(ranks: Ranks) -> None:
    config = Config(
        model=Model(2, 12, 2, 2, None, 20, 40, 16, experts=KINDS["softmax"], init_std=0.2),
        parallel=Parallel(1, 2, 2, 1, 2, 4, data=DataParallel("zero1")),
        batch=Batch(1, 4),
        train=Train(1, "fp64"),
    )
    for counted, whole in ranks.run(norms, config):
        assert counted.item() == pytest.approx(whole.item(), rel=1e-12)


def loss_and_norm(config: Config, grouped: bool) -> tuple[float, float]:
    """Loss and gradients' norm of the first step. grouped: products of all experts are one call, as on a GPU."""
    with patch.object(products, "_has_grouped_products", lambda *_: grouped), noise_in_empty_tensors():
        job = make(config)
        loss = gradients(job, random_batch(job, 0))
        whole = [param.grad.full_tensor().double() for _, param in job.named_parameters() if param.grad is not None]
    return float(loss), torch.stack([grad.square().sum() for grad in whole]).sum().sqrt().item()


@pytest.mark.parametrize("kind", ["groups", "biases"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_that_read_ends_of_rows_on_the_device(precision: str, kind: str, ranks: Ranks) -> None:
    """With buffers of a fixed size, beside exact ones and a product for each expert; rows are aligned."""
    exact = configuration((4, Layout(dp_shard=4, tp=2), "zero2", "1f1b", kind, "none", "adamw"), "exact")
    model = replace(exact.model, width=16, experts=replace(exact.model.experts, width=8))
    exact = replace(exact, model=model, train=replace(exact.train, precision=precision))
    fixed = replace(exact, parallel=replace(exact.parallel, experts=ExpertParallel("worst_case")))
    wanted, found = ranks.run(loss_and_norm, exact, False)[0], ranks.run(loss_and_norm, fixed, True)[0]
    assert found == pytest.approx(wanted, rel={"fp32": 1e-6, "bf16": 2**-7}[precision])
