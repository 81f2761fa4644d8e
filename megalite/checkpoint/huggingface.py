"""What Hugging Face transformers calls the tensors and the sizes of a Llama. Imports no transformers."""

from typing import Any

from megalite.config.schema import Model

NAMES = {  # of our modules, in transformers
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    **{name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")},
}


def sizes(model: Model) -> dict[str, Any]:
    """The sizes of a model, by the names that they have in a configuration of transformers."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }


def their_name(name: str) -> str:
    """Our name in transformers: `layers.0.attention.q.weight` → `model.layers.0.self_attn.q_proj.weight`."""
    name = name.replace("head.norm.", "model.norm.").replace("head.output.", "lm_head.")
    return ".".join(NAMES.get(part, part) for part in name.split("."))
