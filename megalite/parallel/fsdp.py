"""FSDP2 over the data-parallel ranks: when weights are gathered, in which precision, and when gradients are reduced.

    mode   gathered weights              gradients reduced
    ddp    never sharded                 once a step
    zero1  kept through a step           once a step
    zero2  kept through a step           after every micro-batch
    zero3  freed after every use         after every micro-batch

FSDP2's own hooks gather layers one after another. In modes that keep weights, a schedule's GATHER starts the all-gather
earlier, and its RESHARD frees the weights. Its REDUCE says after which backward gradients are reduced.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megalite.base.errors import InputError
from megalite.config.parallel_schema import DataMode
from megalite.parallel.parameter import in_four_bits, parameters
from megalite.plan.parts.part import Weight
from megalite.schedule.reductions import Reduction

Precision = Literal["bf16", "fp32", "fp64"]


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The data type of sharded parameters, their gradients and the optimizer's states."""
    return torch.float64 if precision == "fp64" else torch.float32


def compute_dtype(precision: Precision) -> torch.dtype:
    """The data type of gathered weights and activations."""
    return torch.bfloat16 if precision == "bf16" else parameter_dtype(precision)


def shard(
    stage: nn.Module,
    groups: Iterable[tuple[nn.Module, DeviceMesh]],
    mesh: DeviceMesh,
    precision: Precision,
    mode: DataMode,
    reduce_precision: Literal["fp32", "bf16"],
) -> None:
    """Shard the parameters of `stage` over the data-parallel ranks, in place.

    groups: modules that are gathered one by one, each with the mesh over which it is sharded. All other parameters are
    gathered together, over `mesh`. A mesh has one axis, or two for HSDP: replicas, then shards. Gradients are summed,
    not averaged, because the loss is already divided by the tokens of the whole step. Raises InputError for weights in
    four bits under PyTorch 2.11.
    """
    narrow = precision == "bf16" and reduce_precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision),
        reduce_dtype=torch.bfloat16 if narrow else parameter_dtype(precision),
        cast_forward_inputs=False,
    )
    meshes = {**dict(groups), stage: mesh}
    weights = {found.value: Weight(found.shape, found.role) for found in parameters(stage)}
    if not shards_integers() and any(map(in_four_bits, weights)):
        rule = f"FSDP2 of PyTorch {torch.__version__} shards no integers"
        raise InputError(f"adapter.base = nf4: {rule}; use PyTorch 2.12 or newer, or adapter.base=compute")

    def placement(shards: int, param: Tensor) -> Shard:
        assert isinstance(param, DTensor)
        return Shard(weights[param].shard_dim(shards, param.device_mesh.size()))

    for module, over in meshes.items():
        fully_shard(
            module,
            mesh=over,
            reshard_after_forward=mode == "zero3" and module is not stage,
            shard_placement_fn=partial(placement, over.shape[-1]),
            mp_policy=policy,
        )
    stage.fsdp_groups = [module for module in stage.modules() if isinstance(module, FSDPModule)]  # type: ignore[assignment]
    _gathers_nothing_ahead(next(module for module in _children_first(stage) if isinstance(module, FSDPModule)))
    for group in groups_of(stage):
        if meshes[cast(nn.Module, group)].size() > 1:  # one rank would divide by 1, in another pass over its gradients
            group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)


def shards_integers() -> bool:
    """Return whether FSDP2 shards integers, as which weights in four bits are kept; it does from PyTorch 2.12 on."""
    return torch.__version__ >= "2.12"


def _gathers_nothing_ahead(first: FSDPModule) -> None:
    """Let backward of the group that forward uses first gather no other one.

    Each backward gathers the group before it in the list of all that forward has used, micro-batch after micro-batch.
    Before the first stands the last one, which would stay in memory until another pass needs it.
    """
    first.set_modules_to_backward_prefetch([first])


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def gather(stage: object) -> None:
    """Start to gather the weights of `stage`; every layer waits for its own weights."""
    for group in groups_of(stage):
        group.unshard(async_op=True)


def reshard(stage: object) -> None:
    """Free the gathered weights of `stage`."""
    for group in groups_of(stage):
        group.reshard()


def before_backward(stage: object, mode: str, reduction: Reduction) -> None:
    """Tell FSDP2 what the coming backward of `stage` has to do."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(reduction.last)
    for group in groups_of(stage):  # one by one, for each of these would walk all modules of the stage
        group.set_requires_gradient_sync(reduction.now, recurse=False)
        group.set_requires_all_reduce(reduction.replicas, recurse=False)
        group.set_reshard_after_backward(mode == "zero3", recurse=False)


def after_weight_gradients(stage: object, reduction: Reduction) -> None:
    """Hand gradients that were made outside of autograd to FSDP2, and reduce them if `reduction` says so.

    FSDP2 does both in a callback at the end of a backward pass. PyTorch's own pipeline runtime calls that one as well.
    """
    if isinstance(stage, FSDPModule):
        if reduction.now:  # first without: action I has widened the vectors' gradients, and a reduction needs one dtype
            after_weight_gradients(stage, replace(reduction, now=False, last=False))
        before_backward(stage, "", reduction)
        stage._get_fsdp_state()._root_post_backward_final_callback()


def groups_of(stage: object) -> Sequence[FSDPModule]:
    """The modules of `stage` whose parameters FSDP2 gathers as one group, in the order of forward, from `shard`."""
    groups: Sequence[FSDPModule] = getattr(stage, "fsdp_groups", ())
    return groups
