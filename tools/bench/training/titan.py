"""torchtitan's Llama 3 as one of the implementations (torchtitan 0.2.2, which runs on torch 2.11)."""

from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megalite.checkpoint.maps.meta import params_of, table_of
from megalite.config.errors import InputError
from megalite.config.schema import Config, Model
from megalite.parallel.fsdp import compute_dtype
from megalite_tools.bench.training.peers import PeerStep, Runner, check_comparable, shard, sum_gradients, uses_autocast
from megalite_tools.bench.training.weights import Weights, initial_weights, renamed


def build(config: Config, device: torch.device, tuned: bool, selective: bool) -> Runner:
    """Torchtitan's training step. Raises InputError where it is missing, or cannot train the case.

    selective: recompute cheap operations, as torchtitan does unless told otherwise.
    """
    check_comparable(config, "torchtitan")
    if find_spec("torchtitan") is None:
        raise InputError("torchtitan is not installed; pip install torchtitan==0.2.2")
    try:
        from torchtitan.components.loss import cross_entropy_loss  # noqa: PLC0415 - optional
        from torchtitan.config.job_config import Compile  # noqa: PLC0415
        from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp  # noqa: PLC0415
    except ImportError as error:
        raise InputError(
            f"torchtitan cannot be imported here: {error}; it needs torch 2.11 and its packages"
        ) from error

    model = _model(config.model, initial_weights(config.model, config.run.seed, device), device)
    _recompute(model, "selective" if selective else config.train.recompute, config.train.compile)
    loss = cross_entropy_loss
    if config.train.compile:
        apply_compile(model, Compile(enable=True))
        loss = torch.compile(cross_entropy_loss)
    autocast = uses_autocast(config, tuned)
    if not autocast and config.model.tie_embeddings:
        shard(model, model.layers.values(), config, device)  # torchtitan's own knows no tied weights
    elif not autocast:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        how = "default" if config.parallel.data.mode == "zero3" else "never"
        dtype = compute_dtype(config.train.precision)
        apply_fsdp(model, mesh, dtype, torch.float32, False, reshard_after_forward_policy=how)
        sum_gradients(model)

    def sum_of_losses(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(model(tokens), targets)

    return PeerStep(model, sum_of_losses, config, device, autocast)


def _model(model: Model, weights: Weights, device: torch.device) -> nn.Module:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs  # noqa: PLC0415
    from torchtitan.models.llama3.model.model import Transformer  # noqa: PLC0415

    told, scaling = params_of(replace(model, rope_scaling=None)), model.rope_scaling
    if scaling is None:
        turns = RoPEScalingArgs(scaling_factor=1.0)  # its default scales
    else:
        turns = RoPEScalingArgs(
            scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_length
        )
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps")
    arguments = TransformerModelArgs(
        **{key: told[key] for key in sizes},
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


def _recompute(model: nn.Module, mode: str, compiled: bool) -> None:
    """Torchtitan's own activation checkpointing."""
    from torchtitan.config.job_config import ActivationCheckpoint  # noqa: PLC0415
    from torchtitan.distributed.activation_checkpoint import apply_ac  # noqa: PLC0415
    from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list  # noqa: PLC0415

    if mode != "none":
        how = ActivationCheckpoint(mode=mode, selective_ac_option="op")
        apply_ac(model, how, model_compile_enabled=compiled, op_sac_save_list=_op_sac_save_list)
