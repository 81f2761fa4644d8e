"""Precision and sharding of parameters, gradients and optimizer states; `plan.memory` explains the letters."""

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version

from megalite.config.schema import Config
from megalite.plan.parts.part import in_four_bits
from megalite.plan.parts.sizes import PRECISION_BYTES
from megalite.plan.resolved import Plan


@dataclass(frozen=True)
class States:
    """Precision and sharding in which parameters and gradients are held."""

    plan: Plan

    @property
    def config(self) -> Config:
        return self.plan.config

    @cached_property
    def mode(self) -> str:
        return self.config.parallel.data_mode

    @cached_property
    def w(self) -> int:
        return PRECISION_BYTES[self.config.train.dtype]

    @cached_property
    def p(self) -> int:
        return max(self.w, 4)

    @cached_property
    def r(self) -> int:
        return 2 if self.config.parallel.data.reduce_precision == "bf16" and not self.copies else self.p

    @cached_property
    def copies(self) -> int:
        """Bytes of the copy of a parameter with which layers compute, kept beside it; 0 without one."""
        return self.w if self.plan.copies else 0

    def kept(self, count: int, trained: int, four_bits: int) -> int:
        """Bytes of parameters, some of which are trained; with adapters, others are in the precision of compute or in
        four bits."""
        if self.config.adapter is None:
            return self.p * count
        return self.p * trained + self.w * (count - trained - four_bits) + in_four_bits(four_bits)

    def on_host(self, count: int, trained: int, four_bits: int) -> int:
        """Bytes, of those of `kept`, that are in host memory."""
        if self.config.parallel.placement.parameters == "device":
            return 0
        return self.kept(count, trained, four_bits) - (0 if self.config.on_host(trained=True) else self.p * trained)

    def copied(self, count: int, trained: int) -> int:
        """Bytes of the copies of parameters; with adapters, only of those that are trained."""
        return self.copies * (count if self.config.adapter is None else trained)

    @cached_property
    def shards(self) -> int:
        parallel = self.config.parallel
        return parallel.layout.dp_shard * parallel.cp if parallel.data.sharded else 1

    @cached_property
    def expert_shards(self) -> int:
        """Ranks over which the parameters of experts are sharded, where ranks share out these."""
        return self.config.parallel.expert_shards

    @cached_property
    def managed(self) -> bool:
        """Flag: FSDP2 gathers weights and reduces gradients."""
        return self.plan.fsdp

    @cached_property
    def of_2_15(self) -> bool:
        """Flag: FSDP2 is that of PyTorch 2.15 or newer. A gradient is widened, or added to wide ones, when it is made,
        not when all of its part are there; and while gradients are reduced, none of them is held besides."""
        return self.managed and _pytorch() >= (2, 15)

    @cached_property
    def ahead(self) -> bool:
        """Flag: weights that a rank has whole are copied from the host while the part before computes."""
        return self.config.parallel.placement.parameters == "host" and self.frees and self.shards == 1

    @cached_property
    def replicas(self) -> bool:
        """Flag: sharded gradients are also summed over replicas, in buffers of their own."""
        parallel = self.config.parallel
        return parallel.dp_replicate > 1 or (not parallel.data.sharded and parallel.layout.dp * parallel.cp > 1)

    @cached_property
    def frees(self) -> bool:
        """Flag: gathered weights are freed after every use."""
        return self.managed and self.mode == "zero3"


@cache
def _pytorch() -> tuple[int, ...]:
    """Major and minor version of the installed PyTorch; where there is none, later than all."""
    try:
        return tuple(map(int, version("torch").split(".")[:2]))
    except PackageNotFoundError:
        return (1000,)
