"""Rules of `train.cuda_graph`: micro-batches that differ in their tokens alone, of kernels and collectives over tp."""

from collections.abc import Iterator

from megalite.base.errors import Problem
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Config

# Flag that a rule is broken, the rule, and the change that helps beside that of the key itself.
Rule = tuple[bool, str, str]


def graph_rules(config: Config, dp: int | None) -> Iterator[Problem]:
    """Every broken rule of CUDA graphs with so many data-parallel ranks; None: a layout is searched for."""
    if config.train.cuda_graph:
        for broken, rule, fix in (*_of_layout(config.parallel, dp), *_rules(config)):
            if broken:
                yield Problem("train.cuda_graph", rule, ", or ".join(filter(None, ["use false", fix])), True)


def _of_layout(parallel: Parallel, dp: int | None) -> Iterator[Rule]:
    """Yield each rule of layouts: of what ranks send each other, nothing but collectives over tp has been captured."""
    if dp is None:
        rule = "is for a layout with one data-parallel rank, and without pipeline and context parallelism"
        yield True, f"{rule}, and this is a search for a layout", "megalite plan --as-is"
        return
    rule = f"is for one data-parallel rank, and the layout has {dp}: FSDP2 gathers weights into memory that moves"
    yield dp > 1, rule, "one data-parallel rank: parallel.dp_shard=1 and parallel.dp_replicate=1"
    rule = (
        f"cannot be used with parallel.pp = {parallel.pp}, whose stages send each other messages in every micro-batch"
    )
    yield parallel.pp > 1, rule, "parallel.pp=1"
    rule = f"cannot be used with parallel.cp = {parallel.cp}, whose attention sends keys and values between its blocks"
    yield parallel.cp > 1, rule, "parallel.cp=1"
    rule = "cannot be used with parallel.tensor.overlap = symmetric, whose ranks wait for each other inside of products"
    symmetric = parallel.tp > 1 and parallel.tensor.overlap == "symmetric"
    yield symmetric, rule, "parallel.tensor.overlap=pieces"


def _rules(config: Config) -> Iterator[Rule]:
    """Yield each rule of everything but the layout."""
    train, parallel = config.train, config.parallel
    schedule, mode, product = parallel.pipeline.schedule, parallel.data.mode, train.product
    dropout = config.adapter is not None and config.adapter.dropout > 0
    yield config.run.device == "cpu", "needs CUDA, but run.device = cpu", "run.device=cuda"
    whole = schedule == "1f1b"
    rule = f"needs a forward pass and then its backward, which parallel.pipeline.schedule = {schedule} does not promise"
    yield not whole, rule, "parallel.pipeline.schedule=1f1b"
    rule = f"cannot be used with parallel.data.mode = {mode}, which frees weights after every use"
    yield mode == "zero3", rule, "parallel.data.mode=auto"
    rule = "cannot be used with parallel.placement.parameters = host, whose copies of weights come and go"
    yield parallel.placement.parameters == "host", rule, "parallel.placement.parameters=device"
    rule = "cannot be used with train.offload_activations, whose copies wait for each other"
    yield train.offload_activations, rule, "train.offload_activations=false"
    rule = f"cannot be used with train.product = {product}, which may compute on the host"
    yield product != "plain", rule, "train.product=plain"
    rule = "cannot be used with model.experts, which take other numbers of tokens in every micro-batch"
    yield config.model.experts is not None, rule, ""
    yield (
        config.model.mtp is not None,
        "cannot be used with model.mtp, whose losses have other shares in every step",
        "",
    )
    rule = "cannot be used with data.mask_documents, as every micro-batch has other documents"
    yield config.data.mask_documents, rule, "data.mask_documents=false"
    rule = "cannot be used with batch.curriculum, whose sequences have other lengths"
    yield config.batch.curriculum is not None, rule, "batch.curriculum=null"
    yield (
        dropout,
        "cannot be used with adapter.dropout, which drops other features for every token",
        "adapter.dropout=0",
    )
