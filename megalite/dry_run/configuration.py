"""Configuration and rank that a dry run takes. The prediction that it is compared with takes the same."""

from dataclasses import replace

from megalite.config.parallel_schema import TensorParallel
from megalite.config.schema import AttentionKernel, Config, Kernels
from megalite.plan.parts.window import busiest


def as_counted(config: Config) -> Config:
    """`config` as a dry run runs it: on a CPU, with PyTorch's kernels, its layers not compiled, its experts in turn, on
    GPUs that have what `auto` would like."""
    on_cpu, train = replace(config.run, device="cpu"), replace(config.train, compile=False, cuda_graph=False)
    attention: AttentionKernel = "math" if config.kernels_by_operation.attention == "math" else "auto"
    experts = config.model.experts
    model = config.model if experts is None else replace(config.model, experts=replace(experts, force_balance=True))
    kernels = replace(Kernels.all("torch"), attention=attention)
    parallel = config.parallel
    if config.fuses_over_tp:
        parallel = replace(parallel, tensor=TensorParallel("symmetric"))
    return replace(config, run=on_cpu, model=model, parallel=parallel, train=train, kernels=kernels)


def busiest_rank(config: Config, pp: int) -> int:
    """A rank of pipeline rank `pp` that sends most. Ranks differ only under context parallelism with windows."""
    layout = config.parallel.layout
    return layout.rank(pp=pp, cp=busiest(layout.cp, config.model.sequence_length, config.model.attention.window))
