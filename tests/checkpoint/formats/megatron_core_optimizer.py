"""A program in which an optimizer of Megatron-Core loads its states from a folder, and keeps what it has then.

megatron_core_optimizer.py KIND FOLDER RESULT CASE. KIND: fp32, mixed (bf16 with main weights), or distributed.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron_core_model import build
from megatron_files import MIXED, MODELS
from torch import Tensor


def without_a_gpu() -> None:
    """Let Megatron believe that the CPU is a GPU."""

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(*args: Any, **options: Any) -> Tensor:
            if "cuda" in str(options.get("device")):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    kind = Tensor.type

    def named(self: Tensor, *args: Any, **options: Any) -> Any:
        found = kind(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    for name in ("tensor", "zeros", "empty", "ones", "full", "zeros_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    stream = SimpleNamespace(wait_stream=lambda *_: None)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    Tensor.cuda = lambda self, *_: self
    Tensor.type = named


def main(kind: str, folder: Path, result: Path, case: str) -> None:
    without_a_gpu()
    filesystem_async._process_memory = lambda: 0
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    gpt = build((MODELS | MIXED)[case], 1, 1)
    if kind != "fp32":
        gpt = gpt.bfloat16()
    distributed = kind == "distributed"
    wrapped = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.1,
        bf16=kind != "fp32",
        params_dtype=torch.float32 if kind == "fp32" else torch.bfloat16,
        use_distributed_optimizer=distributed,
    )
    outer = get_megatron_optimizer(options, [DistributedDataParallel(gpt.config, wrapped, gpt)])
    inner = outer.chained_optimizers[0]
    if distributed:
        as_with_fused_adam(inner)
    metadata = torch.load(folder / "common.pt", weights_only=False)["content_metadata"]
    wanted = {"model": gpt.sharded_state_dict(metadata=metadata)}
    wanted["optimizer"] = outer.sharded_state_dict(wanted["model"], is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(wanted, str(folder))
    gpt.load_state_dict(loaded["model"], strict=False)
    outer.load_state_dict(loaded["optimizer"])
    found = {}
    for name, parameter in gpt.named_parameters():
        updated = parameter if kind == "fp32" else parameter.main_param
        states = {"param": updated, **inner.optimizer.state[updated]}
        if distributed:
            states = inner._get_main_param_and_optimizer_states(parameter)
        found[name] = {
            key: value.detach().reshape(parameter.shape if value.dim() else ()).clone()
            for key, value in states.items()
            if isinstance(value, Tensor)
        }
    torch.save(found, result)
    dist.destroy_process_group()


def as_with_fused_adam(optimizer: Any) -> None:
    """Without Apex, torch's AdamW has a step among a parameter's states, which loading does not expect."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for states in optimizer.optimizer.state.values():
        states["step"] = torch.tensor(0.0)
    put = optimizer._set_main_param_and_optimizer_states

    def with_step(parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        group, number = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][number]
        put(parameter, {"step": optimizer.optimizer.state[main]["step"], **tensors})

    optimizer._set_main_param_and_optimizer_states = with_step


if __name__ == "__main__":
    kind, folder, result, case = sys.argv[1:]
    main(kind, Path(folder), Path(result), case)
