"""The kernels that `torch.compile` makes of a layer, generated and compiled without a GPU.

A layer with bf16 copies of its parameters on one data-parallel rank is traced forward and backward on tensors without
data, which are then taken to be on a GPU. PyTorch's compiler writes the programs that a run would launch; none is
launched. Its Triton kernels are compiled for each architecture, with every size of their programs of which a run would
take the fastest. All of it happens in a process of its own, since PyTorch has to be told of a GPU that is not there.
"""

import copy
import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch
from torch._guards import detect_fake_mode
from torch._inductor import codecache, compile_fx
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints, triton_helpers
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.schema import Kernels
from megalite.distributed.mesh import Mesh
from megalite.dry_run.run import fake_world
from megalite.model.decoder import Decoder
from megalite.model.positions import TokenPositions
from megalite.parallel.copies import Copies
from megalite_kernels.compile_report import NoGpuDriver, resource_usage
from megalite_tools.bench.moved_bytes import changed

ARCHITECTURES = (90, 100)
TOKENS = 8192
GPU = torch.device("cuda", 0)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
LAUNCH = re.compile(r"(?:extern_kernels\.(\w+)\(|\b(triton_\w+)\.run\(|torch\.ops\.(\w+\.\w+)\.\w+\()")


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel that the compiler made. registers, spilled: the most that any size of its programs takes."""

    part: str  # "forward" or "backward"
    name: str
    architecture: int
    launches: int
    sizes: int  # program sizes that a run would try
    bytes: float  # per token and launch
    registers: int
    spilled: int  # bytes of stack

    @property
    def needs(self) -> tuple[int, int, int]:
        """Sizes, registers and spilled bytes."""
        return self.sizes, self.registers, self.spilled


@dataclass(frozen=True)
class CompiledLayer:
    """A layer as compiled for one architecture. own_bytes: per token, of megalite's own operations."""

    kernels: tuple[GeneratedKernel, ...]
    launches: Counter[str]
    own_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes per token that are moved beside products and attention."""
        return self.own_bytes + sum(kernel.launches * kernel.bytes for kernel in self.kernels)


@cache
def compiled_layers(preset: str, architectures: Sequence[int] = ARCHITECTURES) -> tuple[CompiledLayer, ...]:
    """A layer of the model that `preset` names, with the kernels that a GPU has by default, for each architecture."""
    interpreted = {"TRITON_INTERPRET": "0"}  # interpreted kernels compile to nothing
    with patch.dict(os.environ, interpreted), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return tuple(pool.map(partial(_compiled, preset), architectures))


def _compiled(preset: str, architecture: int) -> CompiledLayer:
    _install(architecture)
    from_compiler = _Generated(preset)
    from_compiler.trace()
    kernels, launches = [], Counter[str]()
    for part, source in zip(("forward", "backward"), from_compiler.sources, strict=True):
        launched = Counter(filter(None, (name for found in LAUNCH.findall(source) for name in found)))
        launches += launched
        for name, code in KERNEL.findall(source):
            kernels.append(_measured(part, name, code, launched[name], architecture))
    return CompiledLayer(tuple(kernels), launches, from_compiler.own_bytes / TOKENS)


class _Generated:
    """The compiler's programs of a layer: one for forward, one for backward."""

    def __init__(self, preset: str) -> None:
        self.preset = preset
        self.sources: list[str] = []
        self.own_bytes = 0

    def trace(self) -> None:
        """Compile the layer, which is not run."""
        passes = compile_fx._recursive_joint_graph_passes

        def on_gpu_first(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
            _move(graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
            return passes(graph, *args, **kwargs)

        backend = partial(compile_fx.compile_fx, inner_compile=self._lowered)
        settings = inductor.patch(compile_threads=1, fx_graph_cache=False, profile_bandwidth=True)
        eager = functorch.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True)
        torch._dynamo.reset()
        with fake_world(0, 2), settings, eager, patch.object(compile_fx, "_recursive_joint_graph_passes", on_gpu_first):
            mesh = Mesh.build(Layout(), torch.device("cpu"))
            assert mesh is not None
            model = replace(load([self.preset], ()).model, layers=1)
            meta = torch.device("meta")
            stage = Decoder(model, mesh.tp, range(1), first=False, last=False, kernels=Kernels.all("triton"))
            Copies(stage, torch.bfloat16).refresh()
            (kind,), (layer,) = stage.kinds, stage.layers.values()
            assert kind.rotation is not None
            angles = TokenPositions.whole(model, TOKENS, meta, torch.bfloat16).angles(kind.rotation)
            x, added = torch.empty(2, TOKENS, 1, model.width, dtype=torch.bfloat16, device=meta, requires_grad=True)
            torch.compile(layer.forward, dynamic=False, fullgraph=True, backend=backend)(x, angles, _cudnn, added)

    def _lowered(self, graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Note the compiler's program of `graph`. Returns what runs the graph as it was."""
        unchanged = copy.deepcopy(graph)
        moved = _move(graph, inputs)
        with patch.object(GraphLowering, "_compile_to_module", lambda lowering: self._note(lowering)):
            try:
                compile_fx.compile_fx_inner(graph, moved, **settings)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Noted):
                    raise

        def call(args: Sequence[Any]) -> Any:
            return unchanged(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _note(self, lowering: Any) -> None:
        self.own_bytes += _own_bytes(lowering.graph)
        self.sources.append(lowering.codegen()[0].value)
        raise _Noted


class _Noted(Exception):
    """The compiler has written a program, and need not load it."""


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a run with whole sequences has it; cuDNN's kernel is opaque to the compiler."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    return run(q, k, v, None, True, 0.0, True, False)[0].permute(2, 0, 1, 3)


def _move(graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Take the tensors of `graph` to be on the GPU. Returns its inputs there."""
    mode = detect_fake_mode(inputs)
    assert mode is not None
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    with mode:
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=GPU) if isinstance(x, Tensor) else x
            for x in inputs
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*moved)
    return moved


def _own_bytes(graph: Graph) -> int:
    """Bytes of the tensors of megalite's own operations, each once for each operation, twice what one changes."""
    total = 0
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "megalite":
            made = [node.meta["val"]] if node.target._schema.returns else _values(changed(node.target, node.args))
            leaves = tree_leaves([_values(node.all_input_nodes), made])
            total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return total


def _values(nodes: Sequence[Node]) -> list[Any]:
    """The results of nodes of a graph."""
    return [node.meta["val"] for node in nodes]


def _measured(part: str, name: str, code: str, launches: int, architecture: int) -> GeneratedKernel:
    """Compile a kernel from the compiler's source, with every size of its programs."""
    kernel, binaries, compile = getattr(codecache.PyCodeCache.load(code), name), [], triton.compile

    def noting(*args: Any, **kwargs: Any) -> Any:
        binaries.append(compile(*args, **kwargs))
        return binaries[-1]

    with patch.object(triton, "compile", noting), inductor.patch(use_static_triton_launcher=False):
        for size in kernel.configs:
            kernel._precompile_config(size)
    usages = [resource_usage(binary.asm["cubin"]) for binary in binaries]
    moved = 1e9 * kernel.inductor_meta["kernel_num_gb"] / TOKENS
    registers, spilled = (max(usage[at] for usage in usages) for at in range(2))
    return GeneratedKernel(part, name, architecture, launches, len(usages), moved, registers, spilled)


def _install(architecture: int) -> None:
    """Tell PyTorch and Triton of a GPU. This cannot be undone, hence a process of its own."""
    driver.set_active(NoGpuDriver(architecture))
    triton_helpers.set_driver_to_gpu = lambda: None
    capability = divmod(architecture, 10)
    properties = SimpleNamespace(
        name=f"sm_{architecture}",
        gcnArchName=f"sm_{architecture}",  # asked for where PyTorch is built without CUDA
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    fakes: dict[str, Any] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "is_bf16_supported": lambda *_, **__: True,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
        setattr(CudaInterface, name, staticmethod(fake))
    setattr(CudaInterface, "is_available", staticmethod(lambda: True))  # noqa: B010
    for worker in ("get_device_properties", "current_device"):
        setattr(CudaInterface.Worker, worker, staticmethod(fakes[worker]))
    hints.DeviceProperties.create.cache_clear()
    for module, init in (
        (misc_patterns, "_misc_patterns_init"),
        (fuse_attention, "_sfdp_init"),
        (pad_mm, "_pad_mm_init"),
    ):
        setattr(module, init, lambda *_, **__: None)  # they run examples of what they look for on the GPU
