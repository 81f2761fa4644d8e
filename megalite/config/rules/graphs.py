"""Rules of `train.cuda_graph`: one rank, whose micro-batches differ in their tokens alone, and nothing but kernels."""

from collections.abc import Iterator

from megalite.base.errors import Problem
from megalite.config.schema import Config


def graph_rules(config: Config, ranks: int | None) -> Iterator[Problem]:
    """Every broken rule of CUDA graphs in a job of so many ranks; None: a layout is searched for."""
    if config.train.cuda_graph:
        for broken, rule, fix in _rules(config, ranks):
            if broken:
                yield Problem("train.cuda_graph", rule, ", or ".join(filter(None, ["use false", fix])), True)


def _rules(config: Config, ranks: int | None) -> Iterator[tuple[bool, str, str]]:
    """Yield for each rule whether it is broken, the rule, and the change that helps beside that of the key itself."""
    train, parallel = config.train, config.parallel
    schedule, mode, product = parallel.pipeline.schedule, parallel.data.mode, train.product
    dropout = config.adapter is not None and config.adapter.dropout > 0
    alone = "is for a job of one rank, whose micro-batches have no collectives"
    yield ranks is None, f"{alone}, and this is a search for a layout", ""
    yield ranks is not None and ranks > 1, f"{alone}, and the layout makes {ranks}", ""
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
