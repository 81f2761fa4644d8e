"""Small random models of every Hugging Face family, as transformers saves them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.5, 7.0],
}
ORIGINAL = "original_max_position_embeddings"
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
LATENT = {  # in dense layers alone
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.5}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "sliding_window": 5,
    "rope_parameters": YARN | {"truncate": False},
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "tie_word_embeddings": True}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Case:
    family: str  # begins the name of the class of its configurations
    options: dict[str, Any] = field(default_factory=dict)
    causal: str | None = None  # and of the class of models; None: the same

    def make(self, dtype: Any = torch.float32, seed: int = 0) -> Any:
        """transformers' model with random weights, norms and biases included; weights of norms are near the first."""
        gains = 0.0 if self.family.startswith("Gemma") else 1.0
        config = getattr(transformers, f"{self.family}Config")(**{**SIZES, **self.options})
        config._attn_implementation = config._experts_implementation = "eager"
        model = getattr(transformers, f"{self.causal or self.family}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.normal_(gains if "norm" in name else 0.0, 0.3, generator=generator)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_(0.0, 0.3, generator=generator)
        return model.to(dtype).eval()

    def save(self, path: Path, dtype: Any = torch.float32, shard: str = "20KB") -> Any:
        model = self.make(dtype)
        model.save_pretrained(path, max_shard_size=shard)
        return model


CASES = {
    "llama": Case("Llama"),
    "llama tied, all heads": Case("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama 3.1": Case("Llama", {"rope_parameters": ROPE3, "rms_norm_eps": 1e-5}),
    "llama, wide heads": Case("Llama", {"head_dim": 12}),
    "mistral": Case("Mistral", {"sliding_window": None}),
    "mistral, window": Case("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "qwen2": Case("Qwen2"),
    "qwen2 tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, alternating": Case("Qwen2", {**SLIDING, "layer_types": ALTERNATING}),
    "qwen2, all windows": Case("Qwen2", {**SLIDING, "max_window_layers": 0}),
    "qwen3": Case("Qwen3", {"head_dim": 8}),
    "qwen3 tied, wide heads": Case("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3, alternating": Case("Qwen3", {"head_dim": 8, **SLIDING, "layer_types": ALTERNATING}),
    "smollm3": Case("SmolLM3", {"no_rope_layer_interval": 4}),
    "smollm3, every third": Case("SmolLM3", {"no_rope_layers": [1, 1, 0, 1], "tie_word_embeddings": False}),
    "olmo2": Case("Olmo2"),
    "olmo2 tied, all heads": Case("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo3": Case("Olmo3", {"sliding_window": 5}),
    "olmo3, yarn, every second": Case(
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": ALTERNATING,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}},
        },
    ),
    "olmo3, full attention, tied": Case(
        "Olmo3", {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": True, "num_key_value_heads": 4}
    ),
    "gemma": Case("Gemma", {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Case("Gemma2", GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 1.0}),
    "gemma2, no caps, silu": Case(
        "Gemma2",
        GEMMA
        | {
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "hidden_activation": "silu",
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma3": Case("Gemma3Text", GEMMA | {"rope_parameters": LOCAL | {"full_attention": LINEAR}}, "Gemma3"),
    "gemma3, every second, capped, untied": Case(
        "Gemma3Text",
        GEMMA
        | {
            "layer_types": ALTERNATING,
            "rope_parameters": LOCAL,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
        "Gemma3",
    ),
    "gemma3, full attention": Case("Gemma3Text", GEMMA | {"layer_types": ["full_attention"] * 4}, "Gemma3"),
    "qwen2, yarn": Case("Qwen2", {"rope_parameters": YARN}),
    "llama, linear": Case("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "phi3": Case("Phi3"),
    "phi3, window, tied": Case("Phi3", {"sliding_window": 7, "tie_word_embeddings": True}),
    "phi3, part of a head": Case("Phi3", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    "phi3, long": Case("Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75}, ORIGINAL: 16}),
    "phi3, short": Case(
        "Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75, "factor": 3.0}, ORIGINAL: 25}
    ),
    "phi3, shorter than the original": Case(
        "Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75}, ORIGINAL: 64}
    ),
    "phi3, given attention factor": Case(
        "Phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 0.75, "attention_factor": 1.5}, ORIGINAL: 8}
    ),
    "llama, long": Case(
        "Llama",
        {"rope_parameters": LONG | {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], ORIGINAL: 16}},
    ),
    "mixtral": Case("Mixtral", EXPERTS | {"router_jitter_noise": 0.1}),
    "mixtral, window, tied": Case("Mixtral", EXPERTS | {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen3_moe": Case("Qwen3Moe", EXPERTS | {"head_dim": 12, "moe_intermediate_size": 20, "norm_topk_prob": True}),
    "qwen3_moe, some layers": Case(
        "Qwen3Moe",
        EXPERTS | {"head_dim": 8, "moe_intermediate_size": 20, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]},
    ),
    "qwen3_moe, window, tied": Case(
        "Qwen3Moe", EXPERTS | SLIDING | {"head_dim": 8, "moe_intermediate_size": 20, "tie_word_embeddings": True}
    ),
    "olmoe": Case("Olmoe", EXPERTS),
    "glm4_moe": Case("Glm4Moe", GROUPED | {"head_dim": 8, "use_qk_norm": True, "first_k_dense_replace": 2}),
    "glm4_moe, biases, no groups": Case(
        "Glm4Moe", GROUPED | {"attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    ),
    "olmoe, scores of a sum of 1": Case("Olmoe", EXPERTS | {"num_key_value_heads": 4, "norm_topk_prob": True}),
    "gpt_oss": Case("GptOss", GPT_OSS),
    "gpt_oss, full attention, tied": Case(
        "GptOss",
        GPT_OSS | {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "deepseek_v3": Case("DeepseekV3", LATENT | GROUPED | {"first_k_dense_replace": 1}),
    "deepseek_v3, without experts": Case("DeepseekV3", LATENT),
    "deepseek_v2": Case(
        "DeepseekV2",
        LATENT | GROUPED | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v2, greedy": Case(
        "DeepseekV2", LATENT | GROUPED | {"first_k_dense_replace": 0, "n_group": None, "topk_group": None}
    ),
    "deepseek_v3, yarn, queries of the token": Case(
        "DeepseekV3", LATENT | {"q_lora_rank": None, "rope_parameters": YARN | MSCALE}
    ),
    "deepseek_v2, yarn": Case("DeepseekV2", LATENT | {"rope_parameters": YARN | MSCALE}),
    "deepseek_v2, queries of the token, tied": Case(
        "DeepseekV2", LATENT | {"q_lora_rank": None, "tie_word_embeddings": True}
    ),
    "llama, dynamic": Case("Llama", {"rope_parameters": DYNAMIC}),
    "qwen2, dynamic, stretched": Case("Qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}),
}
