"""Bytes, collectives and graphs of a training step, counted on one CPU rank. All need `fake_world(0, 2)`."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed._symmetric_memory import _test_mode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.layout import VOCABULARY_STEP
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Config
from megalite.data.loader import Micros
from megalite.distributed.collectives import Pending
from megalite.model.decoder import Decoder
from megalite.parallel import product
from megalite.plan.parts import pieces
from megalite.plan.resolved import resolve
from megalite.train.build import build, build_mesh, build_stage
from megalite.train.step import gradients, train_step
from megalite_kernels import products
from megalite_tools.bench.moved_bytes import PRODUCTS, MovedBytes

CPU = torch.device("cpu")
LENGTH = 64  # positions
ODD_LENGTH = 10  # positions, with which no activation is as large as a matrix
SETTINGS = (
    "model.width=64", "model.heads=8", "model.kv_heads=4", "model.ffn=96", "model.vocab_size=120",
    f"model.sequence_length={LENGTH}", "batch.micro=1", "batch.global=2", "schedule.name=constant",
)  # fmt: skip
TENSOR_PARALLEL = ("parallel.tp=2", "train.precision=fp32")
GRAPH_PRODUCTS = "aten.mm", "aten.addmm"
VIEWS_AND_ROWS = (
    "embedding_dense_backward", "embedding", "empty_like", "empty", "detach", "view", "t", "slice", "split_with_sizes",
)  # fmt: skip


def staged_bytes(*settings: str) -> tuple[float, Counter[str]]:
    """Bytes per parameter of a layer and micro-batch that are read and written beside products, and by which operation.

    Products add to float32 sums, as on CUDA; training is in bf16 on one rank.
    """
    config = _config("model.layers=2", "train.precision=bf16", f"model.sequence_length={ODD_LENGTH}", *settings)
    mesh = build_mesh(config, CPU)
    assert mesh is not None
    job = build(resolve(config), mesh)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (config.batch.global_, 1, ODD_LENGTH + 1), generator=generator)
    batch = Micros.cut_at(tokens, None)
    with patch.object(product, "has_gpu_products", lambda device: True):
        train_step(job, batch, 0).read()  # makes what later steps find
        embedding = config.model.vocab_size
        matrices = [param for _, param in job.named_parameters() if param.ndim == 2 and embedding not in param.shape]
        sizes = {param.numel() for param in matrices}
        with MovedBytes(lambda name, tensor: name != "addmm_" and tensor.numel() in sizes) as staged:
            gradients(job, batch)
    return staged.bytes.total() / (len(batch.tokens) * sum(param.numel() for param in matrices)), +staged.bytes


class _Order(TorchDispatchMode):
    """Notes collectives with their bytes, matrix products, and waits, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []  # and for which tensor
        self.sizes: dict[int, int] = {}
        self.held: list[Tensor] = []  # so that no two have one address
        self.fused = 0  # bytes of collectives that are one with a product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in (*PRODUCTS, "addmm_"):
            self.events.append(("product", 0))
        elif func.namespace == "symm_mem":  # a product and a collective
            part = result if isinstance(result, Tensor) else args[0]
            self.fused += 2 * part.nbytes  # on two ranks
            self.events.append(("product", 0))
        elif func.namespace == "c10d":
            into, given = args[:2]
            self.held += [into, given]
            self.sizes[into.data_ptr()] = max(into.nbytes, given.nbytes)
            self.events.append(("start", into.data_ptr()))
        return result

    @contextmanager
    def noted(self) -> Iterator[None]:
        wait = Pending.wait

        def noting(pending: Pending) -> Tensor:
            self.events.append(("wait", pending.result.data_ptr()))
            return wait(pending)

        with patch.object(Pending, "wait", noting), self:
            yield

    @property
    def sent(self) -> int:
        """Bytes of all collectives."""
        return self.fused + sum(self.sizes[tensor] for event, tensor in self.events if event == "start")

    @property
    def exposed(self) -> int:
        """Bytes of collectives that are waited for although no product was started after them."""
        total = 0
        for at, (event, tensor) in enumerate(self.events):
            if event == "start":
                until = self.events.index(("wait", tensor), at)
                total += 0 if ("product", 0) in self.events[at:until] else self.sizes[tensor]
        return total


def exposed_collectives(least: int = 1, symmetric: bool = False) -> tuple[float, float]:
    """The exposed and all collectives of a layer under tensor parallelism, in gatherings of its whole input.

    least: bytes from which pieces pay. symmetric: products are fused with collectives. A layer has two gatherings and
    two scatterings in forward; in backward these again, and inputs once more.
    """
    stage = _stage("model.layers=1", symmetric=symmetric)
    stage.first = False  # has no embedding before its layers
    x = torch.zeros(LENGTH // 2, 1, stage.model.width, requires_grad=True)
    order = _Order()
    with patch.object(pieces, "MIN_PIECE_BYTES", least), order.noted():
        Decoder.activations(stage, x).sum().backward()
    return order.exposed / (2 * x.nbytes), order.sent / (2 * x.nbytes)


@cache
def exposed_compiled_collectives() -> tuple[float, float]:
    """The exposed collectives of a layer as compiled, in the order of its graphs, without and with symmetric memory.

    With it, PyTorch's compiler runs a pass that fuses products with collectives, which is told of a GPU here. Forward's
    graph hands backward what it has gathered, so a layer has 8.
    """
    graphs: list[GraphModule] = []

    def noting(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(copy.deepcopy(graph))
        return make_boxed_func(graph.forward)

    compile = torch.compile
    backend = aot_autograd(
        fw_compiler=noting,
        bw_compiler=noting,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compiler.reset()
    with patch.object(torch, "compile", lambda layer, **given: compile(layer, **given, backend=backend)):
        stage = _stage("model.layers=1", "train.compile=true")
        _through_layers(stage, LENGTH)
    whole = LENGTH * stage.model.width
    before = sum(map(_exposed_elements, graphs))
    with _test_mode(), patch.object(dist, "is_nccl_available", lambda: True):
        for graph in graphs:
            view_to_reshape(graph)
            micro_pipeline_tp_pass(graph.graph)
    return before / whole, sum(map(_exposed_elements, graphs)) / whole


def _exposed_elements(graph: GraphModule) -> int:
    """Elements of the collectives of a graph beside which no product runs, and which are no part of one."""
    nodes, found = list(graph.graph.nodes), 0
    names = [str(getattr(node.target, "overloadpacket", "")) for node in nodes]
    for at, node in enumerate(nodes):
        if names[at].startswith("_c10d_functional.") and not names[at].endswith("wait_tensor"):
            (wait,) = (user for user in node.users if str(user.target).startswith("_c10d_functional.wait_tensor"))
            beside = names[at : nodes.index(wait)]
            if not any(name in GRAPH_PRODUCTS or name.startswith("symm_mem") for name in beside):
                found += max(each.meta["val"].numel() for each in (node, *node.all_input_nodes))
    return found


class _Columns(TorchDispatchMode):
    """Notes the longest side of what each matrix product takes."""

    def __init__(self) -> None:
        super().__init__()
        self.longest: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in (*PRODUCTS, "addmm_"):
            self.longest.append(max(max(each.shape) for each in args if isinstance(each, Tensor)))
        return func(*args, **(kwargs or {}))


def columns_outside_tiles() -> int:
    """Columns of the output layer's products that fill no whole tile: of 50,257 tokens under tensor parallelism."""
    stage = _stage("model.layers=1", "model.vocab_size=50257")
    x = torch.zeros(LENGTH // 2, 1, stage.model.width, requires_grad=True)
    with patch.object(products, "PREFERS_ONEDNN", False), _Columns() as columns:
        stage.answer(x, torch.zeros(LENGTH, 1, dtype=torch.int64)).backward()
    assert len(columns.longest) >= 3, "logits and two gradients"
    return max(longest % VOCABULARY_STEP for longest in columns.longest)


def graphs_of_a_layer(lengths: Sequence[int] = (LENGTH,), *settings: str) -> int:
    """Graphs of all compiled layers of one kind under tensor parallelism, for sequences of `lengths`; breaks are
    errors."""
    compile = torch.compile
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    torch.compiler.reset()
    counters.clear()
    with patch.object(torch, "compile", lambda layer, **given: compile(layer, **given, **options)):
        stage = _stage("model.layers=3", "train.compile=true", *settings)
        for length in lengths:
            _through_layers(stage, length)
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def _through_layers(stage: Decoder, length: int) -> None:
    """Forward and backward of all layers."""
    stage.first = False  # has no embedding before its layers
    x = torch.zeros(length // 2, 1, stage.model.width, requires_grad=True)
    Decoder.activations(stage, x).sum().backward()


def _stage(*settings: str, symmetric: bool = False) -> Decoder:
    config = _config(*TENSOR_PARALLEL, *settings)
    mesh = build_mesh(config, CPU)
    assert mesh is not None
    return build_stage(resolve(config), mesh, 0, symmetric=symmetric)


def _config(*settings: str) -> Config:
    return check(load(["small_60m"], [*SETTINGS, "parallel.dp_shard=1", *settings]))
