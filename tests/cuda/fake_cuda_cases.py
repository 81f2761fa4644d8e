"""What runs on the devices of `fake_cuda`, and what it tells the tests."""

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_device
import torch
import torch.distributed as dist
from fake_device import CAPTURED, NOTES, WAITED, Calls, world
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves
from toy_runs import Notes, RandomSamples

from megalite.checkpoint.run.save import Saver
from megalite.checkpoint.store.progress import Progress
from megalite.checkpoint.store.state import State
from megalite.config.layers import Scores
from megalite.config.schema import Config
from megalite.data.loader import Loader, Micros
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.ranks import RankInfo
from megalite.distributed.start.start import GRAPH_REGISTRATION, NCCL, start
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.optim import streams
from megalite.optim.states import HostStates
from megalite.parallel import context, flex, settled_symmetric
from megalite.parallel.context import attention
from megalite.parallel.host_memory import HostMemory
from megalite.parallel.host_parameters import CopiedAhead
from megalite.parallel.offload import to_host
from megalite.parallel.sequence import Documents, Method
from megalite.plan.parts import pieces
from megalite.plan.resolved import resolve
from megalite.plan.state_streams import BLOCK
from megalite.train import vital_signs
from megalite.train.build import Job, build, build_mesh
from megalite.train.inputs import inputs
from megalite.train.loop import Batches, train
from megalite.train.step import train_step

DEVICE = torch.device("cuda", 0)
END = 0  # of a document
BLOCKS = ((3, torch.float32), (PAGESIZE // 4, torch.float32), (PAGESIZE + 2, torch.bfloat16))
Ranks = tuple[int, ...]
Groups = dict[str, set[Ranks]]


def started(rank: int, environment: dict[str, str]) -> tuple[str, list[Any], dict[str, str]]:
    """The device of a rank, the devices that were made current, and the variables of NCCL."""
    NOTES.clear()
    names = {*NCCL, GRAPH_REGISTRATION}
    with world(2, rank), patch.dict(os.environ, environment):
        for name in names - environment.keys():
            os.environ.pop(name, None)
        device = start(RankInfo(rank, 2, rank), "auto", 10.0)
        return str(device), [note[1] for note in NOTES], {name: os.environ[name] for name in names}


def connected(config: Config) -> tuple[Groups, Groups]:
    """The groups over which building a mesh communicates, and those over which a training step does."""
    with _job(config) as (job, building):
        with Calls() as stepping:
            _step(job)
        return building.groups(), stepping.groups()


def fused(config: Config, refusal: str | None) -> tuple[Counter[str], str]:
    """The operations of a step on symmetric memory, and why there are none.

    refusal: what GPUs say; None: they are asked.
    """
    asked = nullcontext() if refusal is None else patch.object(settled_symmetric, "_refusal", lambda mesh: refusal)
    with asked, _job(config) as (job, _), Calls() as calls:
        _step(job)
    return Counter(str(func._schema.name) for func, *_ in calls.seen if func.namespace == "symm_mem"), job.fused.reason


def compiler_settings(config: Config) -> list[dict[str, Any]]:
    """What every layer is compiled with, on GPUs that have symmetric memory."""
    found: list[dict[str, Any]] = []

    def compiled(layer: Any, **settings: Any) -> Any:
        found.append(settings)
        return layer

    with (
        patch.object(settled_symmetric, "_refusal", lambda mesh: ""),
        patch.object(torch, "compile", compiled),
        _job(config),
    ):
        return found


def attended(config: Config) -> list[tuple[str, list[int], list[int] | None, bool]]:
    """Of every call of FlashAttention in a step: which, the shape of its queries, that of documents, whether causal."""
    with _job(config) as (job, _), Calls() as calls:
        _step(job)
    found = []
    for name, causal in (("_flash_attention_forward", 8), ("_flash_attention_backward", 11)):
        first = 0 if name.endswith("forward") else 1
        for args, _ in calls.of(f"aten::{name}"):
            offsets = args[3] if first == 0 else args[6]
            if offsets is not None:
                assert (offsets.dtype, offsets.device) == (torch.int32, DEVICE)
            ends = None if offsets is None else list(offsets.shape)
            found.append((name, list(args[first].shape), ends, args[causal]))
    for name, first, offset in (("packed_attention", 0, 4), ("packed_attention_backward", 1, 7)):
        for args, _ in calls.of(f"megalite::{name}"):
            assert (args[offset].dtype, args[offset].device) == (torch.int32, DEVICE)
            found.append((name, list(args[first].shape), list(args[offset].shape), True))
    return found


def widths_attended(config: Config) -> set[tuple[str, tuple[int, ...]]]:
    """Of every call of a kernel of attention in a step: which, and the widths of queries, keys and values."""
    attend, found = context.scaled_dot_product_attention, set()

    def given(*tensors: Tensor, **options: Any) -> Tensor:
        found.add(("scaled_dot_product_attention", tuple(x.shape[-1] for x in tensors)))
        return attend(*tensors, **options)

    with _job(config) as (job, _), patch.object(context, "scaled_dot_product_attention", given), Calls() as calls:
        _step(job)
    for name, first in (("_flash_attention_forward", 0), ("_flash_attention_backward", 1)):
        for args, _ in calls.of(f"aten::{name}"):
            found.add((name, tuple(x.shape[-1] for x in args[first : first + 3])))
    return found


def packed_in_window(
    documents: list[Documents] | None, joint: bool
) -> list[tuple[str, list[int], list[list[int]] | None, int]]:
    """Of every call of `packed_attention` over 64 positions in a window of 10: its queries, groups, and left."""
    shape = (128, 1) if joint else (64, 2)
    q, k, v = (torch.ones(*shape, heads, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2))
    attend = attention("ring", None, 64, DEVICE, documents, Scores(10), "flash", joint)
    with Calls() as calls:
        attend(q, k, v).sum().backward()
    found = []
    for name, first in (("packed_attention", 0), ("packed_attention_backward", 1)):
        for args, _ in calls.of(f"megalite::{name}"):
            *_, ends, left, _scale = args
            found.append((name, list(args[first].shape), None if ends is None else ends.tolist(), left))
    return found


def attended_in_window(method: Method, kind: Scores, precision: torch.dtype) -> list[dict[str, Any]]:
    """Of every call of FlashAttention over 64 positions on rank 0 of 2: its shapes, and window if any.

    Of two samples, the second has two documents.
    """
    cp, length = 2, 64
    documents: list[Documents] = [(0, length), (0, 20, length)]
    q, k, v = (
        torch.ones(length // cp, 2, heads, 16, dtype=precision, device=DEVICE, requires_grad=True)
        for heads in (4, 2, 2)
    )
    with world(cp):
        attend = attention(method, dist.group.WORLD, length, DEVICE, documents, kind)
        with Calls() as calls:
            attend(q, k, v).sum().backward()
    found = []
    for name, first, causal in (("forward", 0, 8), ("backward", 1, 11)):
        for args, kwargs in calls.of(f"aten::_flash_attention_{name}"):
            shapes = {"queries": args[first].shape[-3], "keys": args[first + 1].shape[-3]}
            found.append({"name": name, **shapes, "causal": args[causal], **kwargs})
    return found


def generated(window: int | None) -> list[tuple[str, str, list[int]]]:
    """What FlexAttention is given for whole sequences with capped scores: devices of queries and mask, and tiles."""
    documents: list[Documents] = [(0, 300), (0, 20, 300)]
    q, k, v = (torch.ones(300, 2, heads, 16, dtype=torch.bfloat16, device=DEVICE) for heads in (4, 2, 2))
    found = []

    def given(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, **_: Any) -> Tensor:
        tiles = block_mask.kv_indices
        found.append((str(q.device), str(tiles.device), list(tiles.shape)))
        return q

    with patch.object(flex, "compiled", lambda on_cuda: given if on_cuda else None):
        y = attention("ring", None, 300, DEVICE, documents, Scores(window, 30.0))(q, k, v)
    assert y.shape == q.shape
    return found


def given_to_sdpa(config: Config) -> set[tuple[int, int, bool, tuple[str, ...]]]:
    """For attention over whole sequences: heads of queries and of keys, whether these are fewer, what may run it."""
    attend, found = context.scaled_dot_product_attention, set()

    def given(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        kernels = tuple(backend.name for backend in _cur_sdpa_kernel_backends())
        found.add((q.shape[1], k.shape[1], options["enable_gqa"], kernels))
        return attend(q, k, v, **options)

    with _job(config) as (job, _), patch.object(context, "scaled_dot_product_attention", given):
        _step(job)
    return found


def stepped(config: Config) -> dict[str, Any]:
    """Where everything of a job is after a step, and how its gradients were used up."""
    with _job(config) as (job, _), Calls() as calls:
        taken = _step(job)
    NOTES.clear()
    states = [job.optimizer.states_of(param) for _, param in job.named_parameters()]
    settled = "synchronize" in [name for name, *_ in NOTES]
    updates = [kwargs["found_inf"] for _, kwargs in calls.of("aten::_fused_adamw_")]
    return {
        "parameters": {str(param.device) for _, param in job.named_parameters()},
        "moments": {str(each.device) for state in states for name, each in state.items() if name != "step"},
        "counts": {str(state["step"].device) for state in states if "step" in state},
        "settled": settled,  # states were waited for, as the device may still write them
        "skips": {None if skips is None else str(skips.device) for skips in updates},
        "signs": (str(taken.values.device), str(taken.arriving.host.device), taken.arriving.arrived is not None),
    }


def copied_to_host() -> list[str]:
    """What streams are told while a tensor is copied to the host."""
    tensor, memory = torch.ones(4, device=DEVICE), HostMemory()
    host = memory.empty_like(tensor)
    NOTES.clear()
    to_host(tensor, host, memory.stream)
    return [name for name, *who in NOTES if memory.stream in who]


def host_memory(refused: bool) -> tuple[list[tuple[Any, ...]], list[bool], list[tuple[Any, ...]]]:
    """What CUDA is told for blocks of which one is given back, and those that PyTorch makes; what it is told after."""
    tensors = [torch.ones(size, dtype=dtype, device=DEVICE) for size, dtype in BLOCKS]
    memory = HostMemory()
    NOTES.clear()
    with patch.object(fake_device, "refuses", refused), Calls() as calls:
        first, *others = [memory.empty_like(tensor) for tensor in tensors]
        address = first.data_ptr()
        memory.give_back(first)
        again = memory.empty_like(tensors[0])
        assert again.data_ptr() == address
        assert (again.dtype, again.shape) == (tensors[0].dtype, tensors[0].shape)
    told, pinned = (
        list(NOTES),
        [kwargs["pin_memory"] for _, kwargs in calls.of("aten::empty") if "pin_memory" in kwargs],
    )
    NOTES.clear()
    memory.give_back(again)
    memory.trim()
    memory.give_back(others.pop())
    memory.close()
    assert [name for name, *_ in NOTES].count("synchronize") == 1
    return told, pinned, [note for note in NOTES if note[0] == "unregister"]


def offloaded(config: Config) -> list[tuple[int, int, int]]:
    """Of two steps: blocks that were registered and copied to, and how often a device's tensor waits for a copy."""
    found = []
    with _job(config) as (job, _):
        batch = Micros.cut_at(torch.randint(1, 128, (1, 2, 65)), None)
        for _ in range(2):
            NOTES.clear()
            with patch("megalite.parallel.offload.to_host", wraps=to_host) as copies:
                job.training(batch).run(inputs(job, batch))
            names = [name for name, *_ in NOTES]
            found.append((names.count("register"), copies.call_count, names.count("record")))
    return found


def staged(config: Config, folder: Path) -> dict[str, Any]:
    """Where a save stages tensors, bytes of their pages, and what CUDA and streams are told, by and by."""
    told: dict[str, Any] = {}
    streams: dict[Any, str] = {}

    def noted(name: str) -> None:
        told[name] = [(kind, *(streams[each] for each in rest if each in streams)) for kind, *rest in NOTES]
        told["registered"] = told.get("registered", 0) + sum(note[2] for note in NOTES if note[0] == "register")
        NOTES.clear()

    with _job(config) as (job, _):
        streams[torch.cuda.current_stream()] = "compute"
        alone: Any = SimpleNamespace(leads=True, rank=0, ranks=1)
        state = State(job.stages, job.optimizer)
        _step(job)
        gc.collect()  # memory of other cases, which would be let go of in between
        NOTES.clear()
        with Saver(state, config, (), folder, alone) as saver:
            assert saver._reserved is not None
            saver._reserved.result()
            noted("begin")
            found = saver._stage(state.tensors())
            streams[saver._staging._memory.stream] = "copies"
            noted("save")
            saver._staging.wait()
            noted("written")
            job.optimizer.step()
            noted("update")
        noted("end")
    pages = sum(-(-part.nbytes // PAGESIZE) * PAGESIZE for part in found.values())
    return told | {"devices": {str(part.device) for part in found.values()}, "pages": pages}


def streamed() -> list[tuple[str, ...]]:
    """What streams are told, by name, while five buckets pass through three slots and are updated."""
    states = HostStates(slot_bytes=BLOCK)
    param = torch.empty(5 * BLOCK // 4, device=DEVICE)
    buckets = [[part] for part in states.zeros(param, torch.float32).split(BLOCK // 4)]
    told: list[tuple[str, ...]] = []
    compute, names = torch.cuda.current_stream(), dict[Any, str]()

    def copy(sources: Sequence[Tensor], targets: Sequence[Tensor], stream: Any, after: Any) -> Any:
        names.setdefault(stream, "in" if sources[0].device.type == "cpu" else "out")
        tell()
        end = real(sources, targets, stream, after)
        tell()
        told.append(("copy", names[stream]))
        return end

    def tell() -> None:
        for stream, other in (rest for name, *rest in NOTES if name == "wait"):
            of = other if isinstance(other, torch.Stream) else other.stream
            told.append(("wait", names.get(stream, "in"), names[of]))
        NOTES.clear()

    names[compute] = "compute"
    NOTES.clear()
    real = streams._copy
    with patch.object(streams, "_copy", copy):
        for (state,) in states.streamed(buckets, param.device):
            assert str(state.device) == "cuda:0"
            tell()
            told.append(("update",))
    tell()
    states.settle()
    assert [name for name, *_ in NOTES] == ["synchronize"]
    return told


def fetched(config: Config) -> list[tuple[str, ...]]:
    """What a second step of a job with parameters on the host tells the streams of compute and of copies, by name.

    Groups of parameters have the names of their modules, and layers are told of when their forward begins.
    """
    told: list[tuple[str, ...]] = []
    with _job(config) as (job, _):
        _step(job)
        found = {(param.requires_grad, param.device.type) for _, param in job.named_parameters()}
        assert found == ({(True, "cpu")} if config.adapter is None else {(True, "cuda"), (False, "cpu")})
        (stage,) = job.stages.values()
        names = {torch.cuda.current_stream(): "compute", stage.parameter_memory.stream: "copies"}
        copy = CopiedAhead._copy

        def copied(group: CopiedAhead) -> None:
            tell()
            told.append(("copy", names[torch.cuda.current_stream()], group._module_fqn))
            copy(group)

        def tell() -> None:
            for stream, other in (rest for name, *rest in NOTES if name == "wait"):
                of = other if isinstance(other, torch.Stream) else other.stream
                if stream in names and of in names:
                    told.append(("wait", names[stream], names[of]))
            NOTES.clear()

        def computed(module: Any, *_: Any) -> None:
            tell()
            told.append(("compute", module_names[module]))

        module_names = {module: f"layers.{number}" for number, module in stage.layers.items()}
        for module in module_names:
            module.register_forward_pre_hook(computed)
        NOTES.clear()
        with patch.object(CopiedAhead, "_copy", copied):
            _step(job)
        tell()
    return told


def trained(config: Config) -> tuple[list[str], list[bool]]:
    """Steps as launched, read and recorded, saves and waits for the device; and whether batches were pinned."""
    events: list[str] = []
    pinned: list[bool] = []
    reading = vital_signs.Reading(2.0, 1.0, ())

    def launch(job: Job, batch: Any, step: int, asked: Any = ()) -> vital_signs.Signs:
        events.append(f"launch {step + 1}")
        return train_step(job, batch, step, asked)

    def read(_: vital_signs.Signs) -> vital_signs.Reading:
        events.append(f"read {sum(event.startswith('read') for event in events) + 1}")
        return reading

    def save(progress: Progress, shared: bool) -> None:
        events.append(f"save {progress.step}")

    saver: Any = SimpleNamespace(
        save=save, settle=lambda: None, news=list, finish=lambda: None, wrote=None, local=False
    )
    with (
        _job(config) as (job, _),
        patch("megalite.train.loop.train_step", launch),
        patch.object(vital_signs.Signs, "read", read),
        patch("megalite.train.metrics.Arriving", lambda _: SimpleNamespace(read=lambda: [1.0])),
        patch.object(torch.cuda, "reset_peak_memory_stats", lambda _: None),
        patch.object(torch.cuda, "synchronize", lambda _: events.append("synchronize")),
        patch.object(torch.Tensor, "pin_memory", lambda batch: pinned.append(batch.is_cpu) or batch),
    ):
        samples: Any = RandomSamples(config.model.sequence_length, config.model.vocab_size)
        loader = Loader(samples, config.batch.micro_size, 1, 0, pin_memory=True)
        report = Notes()
        with patch.object(report, "record", lambda step, _: events.append(f"record {step}")):
            assert train(job, Batches(loader, None), Progress(), saver, lambda: None, report) == 0
    return events, pinned


def captured(config: Config, least_piece: int) -> tuple[list[list[str]], list[Counter[str]]]:
    """Of three steps of two micro-batches: what streams and graphs are told, and what the graphs are made of.

    least_piece: bytes from which it pays to gather and scatter in pieces. GPUs have symmetric memory.
    Streams have the names compute and captures, and graphs their numbers. Of each graph: names of operations, with
    those that have a tensor which is not on the device apart. Every collective in it is waited for there.
    """
    told: list[list[str]] = []
    graphs: list[Any] = []
    CAPTURED.clear()
    WAITED.clear()
    with (
        patch.object(settled_symmetric, "_refusal", lambda mesh: ""),
        patch.object(pieces, "MIN_PIECE_BYTES", least_piece),
        _job(config) as (job, _),
    ):
        names = {torch.cuda.current_stream(): "compute", job.capture.stream: "captures"}
        for _ in range(3):
            NOTES.clear()
            with patch.object(vital_signs, "Arriving", lambda _: None):  # the numbers of a step are on their way
                _step(job)
            graphs += [note[1] for note in NOTES if note[0] == "capture"]
            told.append([_told(note, names, graphs) for note in NOTES])
    sizes = [x.ndim for calls in CAPTURED for args, _ in calls.of("aten::lift_fresh") for x in args]
    assert not any(sizes), "data of the host"
    assert all(any(each is work for each in WAITED) for calls in CAPTURED for work in calls.begun)
    made = [
        Counter(
            ("host: " if {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)} - {DEVICE} else "")
            + str(func)
            for func, args, kwargs in calls.seen
        )
        for calls in CAPTURED
    ]
    return told, made


def _told(note: tuple[Any, ...], names: dict[Any, str], graphs: list[Any]) -> str:
    match note:
        case ("wait", stream, other):
            return f"{names[stream]} wait for {names[other]}"
        case (("replay" | "captured") as what, graph):
            return f"{what} {graphs.index(graph)}"
        case ("capture", graph, pool, stream, mode):
            return f"capture {graphs.index(graph)} in {pool} on {names[stream]}, {mode}"
    return note[0]


def groups(config: Config) -> list[Ranks]:
    """The ranks of every group that a job has."""
    with _job(config):
        found = distributed_c10d._world.pg_group_ranks.items()
        return [tuple(ranks) for group, ranks in found if group is not dist.GroupMember.NON_GROUP_MEMBER]


def timeouts(config: Config) -> set[timedelta]:
    """What `Mesh.build` sets the timeouts of all groups to."""
    told = []
    with (
        world(config.parallel.layout.world_size),
        patch("megalite.distributed.mesh.set_timeout", lambda *given: told.append(given)),
    ):
        mesh = Mesh.build(config.parallel.layout, DEVICE, timeout=timedelta(seconds=77))
        assert mesh is not None
        assert {group for _, group in told} == set(mesh.groups)
    return {timeout for timeout, _ in told}


def inferred(config: Config) -> tuple[dict[str, list[int]], set[str]]:
    """The sizes of what a pass of prompts, of next tokens and of scores gives, and the devices that took part."""
    layout = config.parallel.layout
    with world(layout.world_size), torch.no_grad():
        mesh = Mesh.build(layout, DEVICE, sharded=False)
        assert mesh is not None
        engine = Engine(config.model, mesh, torch.bfloat16)
        cache = engine.cache(3, 32)
        with Calls() as calls:
            first = engine.prompts([[1] * 9, [2], [3] * 20], cache, range(3), [8, 9, 29])
            following = engine.next([4, 5, 6], [9, 1, 20], cache)
            alone = engine.next([4], [10], cache)
            drawn = engine.agree(3, lambda whole: Draw(1.0, 5, 0.9)(whole, [(0,), (1,), (2,)]), following, torch.int64)
            scores = engine.scores([[Stem([1, 2, 3], [[4, 5], [6]]), Stem([7], [[8, 9]])]])
        found = {"prompts": first, "next": following, "alone": alone, "drawn": drawn, "scores": scores}
        devices = {str(tensor.device) for tensor in found.values() if tensor is not None}
        told = {name: list(tensor.shape) for name, tensor in found.items() if tensor is not None}
        flash = [args[3] is not None for args, _ in calls.of("aten::_flash_attention_forward")]
        assert all(flash[: config.model.layers]), "prompts are documents of one sequence"
        return told, devices


@contextmanager
def _job(config: Config) -> Iterator[tuple[Job, Calls]]:
    """Rank 0 of a job, and the operations that building its mesh took."""
    layout = config.parallel.layout
    with world(layout.world_size):
        with Calls() as calls:
            mesh = build_mesh(config, DEVICE)
        assert mesh is not None
        with patch.object(Tensor, "is_pinned", lambda _: True):  # memory that is registered is
            yield build(resolve(config), mesh), calls


def _step(job: Job) -> vital_signs.Signs:
    """A step on two micro-batches, whose samples each have two documents."""
    model, batch = job.config.model, job.config.batch
    tokens = torch.randint(1, model.vocab_size, (2, batch.micro_size, model.sequence_length + 1))
    tokens[..., 20] = END
    return train_step(job, Micros.cut_at(tokens, END), 0)
