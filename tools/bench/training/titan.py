"""torchtitan's Llama 3 as one of the implementations (torchtitan 0.2.2, which runs on torch 2.11)."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config.job_config import ActivationCheckpoint, Compile
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_compile, apply_fsdp
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from megalite.checkpoint.weights.maps.meta import params_of, table_of
from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.parallel.fsdp import compute_dtype
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.peers import (
    PeerStep,
    Runner,
    check_comparable,
    shard,
    sum_gradients,
    uses_autocast,
)
from megalite_tools.bench.training.weights import Weights, initial_weights, renamed

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps")


def build(case: Case, config: Config, device: torch.device) -> Runner:
    """Torchtitan's training step. Raises InputError for what it cannot train."""
    check_comparable(config, case.implementation)
    model = _model(config.model, initial_weights(config.model, config.run.seed, device), device)
    recompute, compiled = "selective" if case.selective else config.train.recompute, config.train.compile
    if recompute != "none":
        how = ActivationCheckpoint(mode=recompute, selective_ac_option="op")
        apply_ac(model, how, model_compile_enabled=compiled, op_sac_save_list=_op_sac_save_list)
    if compiled:
        apply_compile(model, Compile(enable=True))
    loss = torch.compile(cross_entropy_loss) if compiled else cross_entropy_loss
    autocast = uses_autocast(config, case.tuned)
    if not autocast:
        _shard(model, config, device)

    def sum_of_losses(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(model(tokens), targets)

    return PeerStep(model, sum_of_losses, config, device, autocast)


def _shard(model: Transformer, config: Config, device: torch.device) -> None:
    if config.model.tie_embeddings:  # torchtitan's own knows no tied weights
        shard(model, model.layers.values(), config, device)
        return
    mesh, dtype = init_device_mesh(device.type, (dist.get_world_size(),)), compute_dtype(config.train.dtype)
    how = "default" if config.parallel.data_mode == "zero3" else "never"
    apply_fsdp(model, mesh, dtype, torch.float32, False, reshard_after_forward_policy=how)
    sum_gradients(model)


def _model(model: Model, weights: Weights, device: torch.device) -> nn.Module:
    told, scaling = params_of(replace(model, rope_scaling=None)), model.rope_scaling
    turns = RoPEScalingArgs(scaling_factor=1.0)  # its default scales
    if scaling is not None:
        factors = scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = RoPEScalingArgs(*factors, scaling.original_length)
    arguments = TransformerModelArgs(
        **{key: told[key] for key in SIZES},
        rope_theta=model.rope_theta,
        rope_scaling_args=turns,
        max_seq_len=model.sequence_length,
    )
    with torch.device(device):
        built = Transformer(arguments)
    built.load_state_dict(renamed(weights, table_of(model)), assign=True)
    if model.tie_embeddings:
        built.output.weight = built.tok_embeddings.weight
    return built.train()
