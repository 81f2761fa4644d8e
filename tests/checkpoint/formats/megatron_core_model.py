"""A program that makes a model of Megatron-Core and saves it, or loads one, and keeps its logits.

megatron_core_model.py save|train|load FOLDER LOGITS CASE TP PP EP, under torchrun. train: saves after a step of Adam,
and keeps the states of the optimizer instead of logits.
"""

import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_files import MIXED, MODELS, arguments, expert_arguments, latent_arguments, padded

from megalite.config.model_schema import Model

TOKENS = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(1))


def main(action: str, folder: Path, logits: Path, case: str, tp: int, pp: int, ep: int) -> None:
    torch.cuda.synchronize = lambda *_: None  # Megatron expects a GPU, and psutil
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_: self
    filesystem_async._process_memory = lambda: 0
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None  # looked up, though it is not imported without Transformer Engine
    dist.init_process_group("gloo")
    apart = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1} if ep > 1 else {}
    parallel_state.initialize_model_parallel(tp, pp, **apart)
    model = (MODELS | MIXED)[case]
    torch.manual_seed(dist.get_rank() % tp)
    gpt = build(model, tp, pp, **apart)
    with torch.no_grad():
        corrections = ((name, buffer) for name, buffer in gpt.named_buffers() if name.endswith("expert_bias"))
        for name, parameter in chain(gpt.named_parameters(), corrections):  # norms and biases too, so that all matter
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name else 0.0))
    state = gpt.sharded_state_dict()
    more = {"args": Namespace(**arguments(model, tp, pp)), "checkpoint_version": 3.0, "iteration": 5}
    if action == "train":
        states = trained(gpt)
        folder.mkdir(parents=True)
        dist_checkpointing.save({"model": state, "optimizer": states.sharded_state_dict(state), **more}, str(folder))
        of = states.optimizer.state
        torch.save({name: dict(of[parameter]) for name, parameter in gpt.named_parameters()}, logits)
        return
    if action == "save":
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state | more, str(folder))
    else:
        loaded = dist_checkpointing.load(state, str(folder))
        weights = {name: loaded[name] for name in gpt.state_dict() if not name.endswith("_extra_state")}
        assert not gpt.load_state_dict(weights, strict=False).unexpected_keys
    if tp == pp == 1:
        positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
        ones = torch.ones(TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool)
        with torch.no_grad():
            torch.save(gpt(TOKENS, positions, ~ones.tril()[None, None]), logits)
    dist.barrier()
    dist.destroy_process_group()


def trained(gpt: GPTModel) -> FP32Optimizer:
    """Megatron's optimizer after a step with random gradients."""
    adam = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    for parameter in gpt.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    optimizer = FP32Optimizer.__new__(FP32Optimizer)  # its constructor asks for a GPU
    optimizer.optimizer, optimizer.config = adam, OptimizerConfig(optimizer="adam", lr=1e-3)
    optimizer.is_stub_optimizer = False
    return optimizer


class Attention(DotProductAttention):
    """Takes widths of keys and values as that of Transformer Engine does: they are those of its inputs."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)


def build(model: Model, tp: int, pp: int, **more: Any) -> GPTModel:
    experts = {key: value for key, value in expert_arguments(model).items() if key != "expert_model_parallel_size"}
    experts["num_moe_experts"] = experts.pop("num_experts")
    if model.experts is not None:
        experts |= {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "allgather"}
    if model.attention.latent is not None:
        more |= latent_arguments(model) | {"kv_channels": model.attention.latent.value_width}
        more |= {"rotary_base": model.rope_theta, "num_query_groups": model.heads}
    config = (TransformerConfig if model.attention.latent is None else MLATransformerConfig)(
        num_layers=model.layers,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float32,
        **experts,
        **{"num_query_groups": model.kv_heads, "kv_channels": model.head_size, "qk_layernorm": model.qk_norm, **more},
    )
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in layers.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        config,
        layers,
        vocab_size=padded(model.vocab_size, tp),
        max_sequence_length=model.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(model.rope_theta),
    )


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    action, folder, logits, case, *sizes = sys.argv[1:]
    main(action, Path(folder), Path(logits), case, *map(int, sizes))
