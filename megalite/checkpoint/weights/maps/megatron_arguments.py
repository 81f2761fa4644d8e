"""Meaning of the arguments in a checkpoint of Megatron-LM, and the arguments that a model has. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError, listing
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.megatron import VOCABULARY_STEP, Split
from megalite.checkpoint.weights.maps.megatron_experts import expert_arguments, experts
from megalite.checkpoint.weights.maps.megatron_latent import latent, latent_arguments
from megalite.checkpoint.weights.maps.models import checked, lost, refuse_mtp
from megalite.config.model_schema import Attention, Model, RopeScaling

DEFAULTS = {  # values that Megatron takes for arguments that checkpoints of older versions do not have
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
    "init_method_std": 0.02,
    "rotary_base": 10000,
    "rope_scaling_factor": 8.0,
}
NEUTRAL_VALUES: dict[str, tuple[Any, str]] = {  # the only value that megalite's layers are made for; what another means
    "normalization": ("RMSNorm", "is another norm than RMSNorm"),
    "position_embedding_type": ("rope", "is another kind of positions than RoPE"),
    "swiglu": (True, "means another activation than SwiGLU"),
    "add_bias_linear": (False, "means biases of all linear layers"),
    "apply_layernorm_1p": (False, "means norms of 1 + weight"),
    "rotary_percent": (1.0, "turns a part of every head only"),
    "rotary_interleaved": (False, "turns neighbouring elements of a head"),
    "rotary_seq_len_interpolation_factor": (None, "stretches positions"),
    "apply_residual_connection_post_layernorm": (False, "takes residuals from behind the norms"),
    "mtp_num_layers": (None, "means layers that predict further tokens"),
    "heterogeneous_layers_config_path": (None, "means layers of different kinds"),
    "hybrid_layer_pattern": (None, "means layers of different kinds"),
    "hybrid_override_pattern": (None, "means layers of different kinds"),
    "is_hybrid_model": (False, "means layers of different kinds"),
    "experimental_attention_variant": (None, "is another kind of attention"),
    "linear_attention_type": (None, "is another kind of attention"),
    "attention_output_gate": (False, "means gates of attention's output"),
    "softmax_type": ("vanilla", "means attention sinks"),
    "qk_l2_norm": (False, "is another norm of queries and keys"),
    "no_rope_freq": (None, "means layers without positions"),
    "activation_func_clamp_value": (None, "bounds activations"),
}
ROPE_SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)  # scaling by --use-rope-scaling; its factor alone can be set


def model_of(arguments: Mapping[str, Any], file: str) -> Model:
    """The model that the arguments in `file` mean. Raises InputError, also for what megalite's layers do not have."""
    values = {**DEFAULTS, **{key: value for key, value in arguments.items() if value is not None}}
    if "position_embedding_type" not in arguments and values.get("use_rotary_position_embeddings") is True:
        values["position_embedding_type"] = "rope"  # before there were others
    fields = Fields(f"{file}: args", values)
    for key, (value, why) in NEUTRAL_VALUES.items():
        fields.refuse(key, value, why)
    heads = fields.whole("num_attention_heads")
    width = fields.whole("hidden_size")
    head = fields.whole("kv_channels") if fields.get("kv_channels") is not None else None
    scaling = replace(ROPE_SCALING, factor=fields.number("rope_scaling_factor"))
    length = "max_position_embeddings" if fields.get("max_position_embeddings") is not None else "seq_length"
    epsilon = "norm_epsilon" if fields.get("norm_epsilon") is not None else "layernorm_epsilon"
    model = Model(
        layers=fields.layers("num_layers"),
        width=width,
        heads=heads,
        kv_heads=fields.whole("num_query_groups") if fields.flag("group_query_attention") else heads,
        head_width=None if head is None or head * heads == width else head,
        ffn=fields.whole("ffn_hidden_size"),
        vocab_size=_vocabulary(fields),
        sequence_length=fields.whole(length),
        rope_theta=fields.number("rotary_base"),
        rope_scaling=scaling if fields.flag("use_rope_scaling") else None,
        norm_eps=fields.number(epsilon, 1e-5),
        tie_embeddings=not fields.flag("untie_embeddings_and_output_weights"),
        qk_norm=fields.flag("qk_layernorm"),
        qkv_bias=fields.flag("add_qkv_bias"),
        attention=_attention(fields),
        experts=experts(fields, fields.layers("num_layers")),
        init_std=fields.number("init_method_std"),
    )
    return checked(replace(model, **latent(fields, model.attention)), fields.file)


def arguments_of(model: Model, split: Split, size: int, dtype: str) -> dict[str, Any]:
    """The arguments of a model; `size` is that of its vocabulary with padding. Raises InputError if none express it."""
    refuse_mtp(model, "Megatron's files")
    found = {
        "num_layers": model.layers,
        "hidden_size": model.width,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "group_query_attention": model.kv_heads != model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_size,
        "seq_length": model.sequence_length,
        "encoder_seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": size,
        "make_vocab_size_divisible_by": VOCABULARY_STEP,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": False,
        "rotary_base": int(model.rope_theta) if model.rope_theta == int(model.rope_theta) else model.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": model.rope_scaling.factor if model.rope_scaling else ROPE_SCALING.factor,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": model.init_std,
        **expert_arguments(model),
        **latent_arguments(model),
        "mtp_num_layers": None,
        "tensor_model_parallel_size": split.tp,
        "pipeline_model_parallel_size": split.pp,
        "virtual_pipeline_model_parallel_size": split.virtual if split.virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": (
            model.layers // (split.pp * split.virtual) if split.virtual > 1 else None
        ),
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": split.tp > 1,
        "data_parallel_random_init": False,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tokenizer_type": None,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    if model.attention.window is not None:
        found["window_size"] = (model.attention.window - 1, 0)
        found["window_attn_skip_freq"] = model.attention.full_every
    if missing := lost(model, model_of(found, "Megatron")):
        raise InputError(f"Megatron has no arguments for {listing(missing, 'and')}")
    return found


def _vocabulary(fields: Fields) -> int:
    """The true size of the vocabulary where it is told, else that with padding."""
    size = fields.whole("padded_vocab_size", fields.get("vocab_size"))
    if fields.get("vocab_size") is None:
        return size
    ends = 1 if fields.get("tokenizer_type") == "NullTokenizer" else 0  # it adds a token for the end of a document
    true = fields.whole("vocab_size") + ends
    if true > size:
        raise fields.wrong("vocab_size", f"must be at most padded_vocab_size = {size}")
    return true


def _attention(fields: Fields) -> Attention:
    window = fields.get("window_size")
    match window:
        case None | (-1, 0):
            return Attention()
        case (int(left), 0) if left >= 0:
            pass
        case _:
            raise fields.wrong("window_size", "must be a number of tokens before and 0 tokens behind")
    every = fields.get("window_attn_skip_freq")
    if every is not None and type(every) is not int:
        raise fields.wrong("window_attn_skip_freq", "megalite has windows in all layers, or in all but every n-th")
    return Attention(left + 1, every)
