"""What this program uses of PyTorch without PyTorch promising to keep it, as the installed version has it.

`python tests/cuda/torch_interfaces.py` writes it into the table of versions that the tests compare with.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path

import torch

TABLE = Path(__file__).with_suffix(".json")
OPERATORS = (
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_fused_adamw_",
    "_foreach_add_.List",
    "_foreach_mul_.Tensor",
    "_foreach_norm.Scalar",
    "silu_backward",
)
FUNCTIONS = (
    "torch.autograd.graph:get_gradient_edge",
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    "torch.distributed._symmetric_memory:_fused_all_gather_matmul_fallback",
    "torch.distributed._symmetric_memory:_fused_matmul_reduce_scatter_fallback",
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "torch.distributed._symmetric_memory:get_backend",
    "torch.distributed.checkpoint.default_planner:create_default_global_save_plan",
    "torch.distributed.checkpoint.default_planner:create_default_local_save_plan",
    "torch.distributed.checkpoint.filesystem:FileSystemWriter.__init__",
    "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp:FSDPModule.set_is_last_backward",
    "torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync",
    "torch.distributed.fsdp:FSDPModule.unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_inputs.fget",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_all_gather_outputs",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._to_unsharded",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback",
    "torch.distributed.tensor:DTensor.__new__",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec.__init__",
    "torch.multiprocessing.reductions:StorageWeakRef.__init__",
)


def installed() -> dict[str, str]:
    """Schemas of operators, and parameters of functions without their types."""
    schemas = {f"{schema.name}.{schema.overload_name}": str(schema) for schema in torch._C._jit_get_all_schemas()}
    found = {name: schemas[f"aten::{name}" if "." in name else f"aten::{name}."] for name in OPERATORS}
    return found | {name: _parameters(name) for name in FUNCTIONS}


def version() -> str:
    """Major and minor."""
    return ".".join(torch.__version__.split(".")[:2])


def _parameters(name: str) -> str:
    module, _, path = name.partition(":")
    function = import_module(module)
    for part in path.split("."):
        function = getattr(function, part)
    if inspect.isbuiltin(function):
        return (function.__doc__ or "").partition("\n")[0]
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


if __name__ == "__main__":
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table[version()] = installed()
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
