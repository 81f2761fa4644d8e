"""The memory and transfers of one rank's step, counted while the real code runs, without its device or other ranks.

Collectives go to a process group that answers at once, and tensors have shapes but no data (torch's FakeTensor), so
a rank of any world runs on any machine. Kernels are the CPU's.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.checkpoint.run.save_plan import local_parts
from megalite.checkpoint.store.state import State, is_state
from megalite.checkpoint.weights.argument import without_weights
from megalite.config.load import files_and_overrides, load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.data.loader import Micros
from megalite.distributed.mesh import Mesh
from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.dry_run.live_bytes import LiveBytes
from megalite.dry_run.transfers import CountedTransfers, axes_of, with_world_apart
from megalite.optim.build import build_optimizer
from megalite.parallel.gradients import Gradients
from megalite.parallel.host_parameters import materialize
from megalite.parallel.parameter import dtensor
from megalite.plan.activations import Activations
from megalite.plan.memory.fit import fitted
from megalite.plan.memory.held import FILES, HOST_MEMORY, OUTSIDE_KINDS, STATES_IN
from megalite.plan.memory.peak import enough_micro_batches, rank_memory
from megalite.plan.parts.transfers import Transfer
from megalite.plan.resolved import Plan, resolve
from megalite.plan.state_streams import BUCKET_BYTES
from megalite.train.build import Job, build, build_mesh
from megalite.train.garbage import Garbage
from megalite.train.step import train_step

CPU = torch.device("cpu")
GATHERED_OF = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]


@dataclass(frozen=True)
class DryRun:
    """Bytes and transfers that a dry run has counted."""

    bytes: dict[str, int]  # by kind, at the peak
    doing: str  # activity of the rank at the peak
    transfers: Counter[Transfer]  # transfers of a step of `micro_batches`
    micro_batches: int


def dry_run(config: Config, pp: int) -> DryRun:
    """Bytes of every kind at the peak of a training step on pipeline rank `pp`, see `count_step`, and its transfers.

    Among the ranks with this pp coordinate, that of `busiest_rank` is taken. The dry run computes only as many
    micro-batches as reach the peak, but counts the inputs of all. It opens and closes the default process group.
    """
    config = as_counted(config)
    costing = costing_of(config)
    full = rank_memory(config, pp, costing).micro_batches
    plan = resolve(config, costing=costing)  # nothing can be measured here, so costs of layers are estimated
    m = enough_micro_batches(plan, pp, full)
    length = config.model.sequence_length
    with dry_job(plan, busiest_rank(config, pp)) as (job, fake):
        tokens = torch.zeros(m, config.batch.micro_size, length + 1, dtype=torch.int64)
        # Each sample is one document: masks and positions take as many bytes as with several.
        with CountedTransfers(axes_of(job.mesh)) as counted:
            found, doing = count_step(job, Micros.cut_at(tokens, None), fake)
    sizes = Activations(config)
    found["activations"] += (full - m) * sizes.inputs
    if sizes.shared_buffer:  # PyTorch has it outside of its allocator, and on a CPU nowhere
        found["temporaries"] = found.get("temporaries", 0) + sizes.shared_buffer
    return DryRun(found, doing, counted.found, m)


@contextmanager
def dry_job(plan: Plan, rank: int) -> Iterator[tuple[Job, FakeTensorMode]]:
    """The job of `rank`, and the mode of its tensors, which is on. Opens and closes the default process group.

    plan: uncompiled, and with torch's own kernels.
    """
    config, layout = plan.config, plan.config.parallel.layout
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(rank, layout.world_size):
        mesh = build_mesh(config, CPU)
        assert mesh is not None
        mesh = with_world_apart(mesh)
        job = build(plan, replace(mesh, device=torch.device("meta")))  # a mesh cannot be sliced in fake mode
        with fake:
            yield _materialized(job, mesh), fake


def count_step(job: Job, batch: Micros, fake: FakeTensorMode | None = None) -> tuple[dict[str, int], str]:
    """Bytes of every kind of `plan.memory.KINDS` that a training step holds at its peak, with optimizer states.

    Also what the rank was doing at the peak.

    Host memory is counted at its own peak, as bytes in files are, both with the copies that `checkpoint.async` keeps.

    batch: as for `train_step`. fake: the mode of the job's tensors, if they have no data.
    """
    params = [param for _, param in job.named_parameters()]
    # States that do not exist yet are made now: without them, the first step of a run peaks lower than all others.
    trained = [param for param in params if param.requires_grad]
    states = [state for param in trained for state in job.optimizer.states_of(param).values()]
    live = LiveBytes(fake, lambda: job.activity.now[0])
    for copies in job.copies:
        copies.refresh()
    for param in params:
        live.add([param], HOST_MEMORY if job.config.on_host(param.requires_grad) else "parameters")
    live.add([*chain.from_iterable(job.copies)], "parameters")
    kept_in = STATES_IN[job.config.optim.place]
    live.add(states, kept_in)
    live.add(job.optimizer.buffers(), HOST_MEMORY)
    live.add([batch.tokens], "activations")
    sharded = {id(param) for param in params}

    def see_gathered(module: torch.nn.Module, _: object) -> None:
        live.add((param for param in module.parameters() if id(param) not in sharded), "gathered weights")

    reduced_to = HOST_MEMORY if job.config.on_host(trained=True) else "gradients"
    moved = set[torch.Tensor]()

    def move_gradient(param: torch.Tensor) -> None:
        """Copy a gradient that FSDP2 has reduced, as it does itself where the host is not the device."""
        if param not in moved:
            assert isinstance(param.grad, DTensor)
            moved.add(param)
            param.grad = dtensor(param.grad._local_tensor.clone(), param.grad._spec)
            live.add([param.grad], reduced_to)

    def see_gradients(*_: object) -> None:
        live.add((param.grad for param in params if param.grad is not None), reduced_to)

    modules = chain.from_iterable(stage.modules() for stage in job.stages.values())
    hooks = [module.register_forward_pre_hook(see_gathered) for module in modules if isinstance(module, FSDPModule)]
    hooks.append(job.optimizer.register_step_pre_hook(see_gradients))
    if reduced_to == HOST_MEMORY:
        hooks += [param.register_post_accumulate_grad_hook(move_gradient) for param in trained]
    job.memory.watch = lambda host: live.add([host], HOST_MEMORY)  # on a CPU too
    at_rest = Garbage(job.config.train.gc_interval)
    with at_rest, live, _swapped(FSDPParam, "all_gather_inputs", property(copied_from_host)):
        train_step(job, batch, 0)
    job.memory.watch = None
    for hook in hooks:
        hook.remove()
    found = live.peak(apart=OUTSIDE_KINDS)
    if kept_in == FILES and states:
        found[HOST_MEMORY] += BUCKET_BYTES  # through which a save reads states
    if job.config.checkpoint.async_:
        copied = local_parts(State(job.stages, job.optimizer, job.config.adapter is not None).tensors())
        for name, part in copied.items():
            kind = FILES if kept_in == FILES and is_state(name) else HOST_MEMORY
            found[kind] = found.get(kind, 0) + part.nbytes
    return found, str(live.busy(apart=OUTSIDE_KINDS))


def _materialized(job: Job, mesh: Mesh) -> Job:
    """The job, moved from the meta device to CPU tensors of the current fake mode."""
    for stage in job.stages.values():
        materialize(stage, mesh.device)
    config = job.config
    device = mesh.device if config.on_host(trained=True) else None
    stages = job.stages.values()
    optimizer = build_optimizer(stages, config.model, config.optim, None, mesh.stage, job.copies, device)
    gradients = Gradients(job.stages, job.plan.placement, mesh, config.model.shares_embedding)
    return replace(job, mesh=mesh, gradients=gradients, optimizer=optimizer)


def copied_from_host(param: FSDPParam) -> list[torch.Tensor]:
    """Tensors that FSDP2 gathers of a parameter: of a copy if it is offloaded, as where the host is not the device."""
    shard = param._sharded_param_data
    if param.offload_to_cpu:
        param._sharded_param_data = shard.clone()
    try:
        return GATHERED_OF(param)
    finally:
        param._sharded_param_data = shard


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of a world without the other ranks, in which all that is sent arrives at once."""
    # PyTorch offers no other way than to replace two of its functions. DTensor tries operations on global shapes in the
    # fake mode that it finds; in the job's own mode, these would be counted. And fake transfers would never complete.
    own = FakeTensorMode()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            _swapped(_sharding_prop, "detect_fake_mode", lambda *_: own),
            _swapped(FakeWork, "is_completed", lambda _: True),
        ):
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # DTensor would take meshes of this world, with its groups, for those of the next


@contextmanager
def _swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Set `owner.name` to `value` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def main(arguments: Sequence[str]) -> int:
    """The command that `megalite show --memory --measure` and `commands.selfcheck` run: prints a `DryRun` as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("inputs", nargs="*")
    args = parser.parse_args(arguments)
    try:
        inputs, overrides = files_and_overrides(args.inputs)
        files, model = without_weights(inputs)
        config = check(load(files, overrides, model), args.world_size)
        found = dry_run(fitted(config, costing=costing_of(config)), args.pp)
        print(json.dumps(asdict(found) | {"transfers": [[*key, times] for key, times in found.transfers.items()]}))
    except InputError as error:
        print(error, file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE
