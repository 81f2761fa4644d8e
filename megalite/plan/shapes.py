"""Name and shape of every weight of a model, without building it."""

from collections.abc import Iterator

from megalite.config.schema import Model


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights by global name; a head that uses the embedding's weight has none of its own."""
    matrix = (model.vocab_size, model.width)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": matrix}
    for layer in range(model.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(model)}
    shapes["head.norm.weight"] = (model.width,)
    return shapes if model.tie_embeddings else {**shapes, "head.output.weight": matrix}


def _layer(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, queries, keys = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        yield f"attention.{name}.weight", (size, width)
        if model.qkv_bias:
            yield f"attention.{name}.bias", (size,)
    yield "attention.o.weight", (width, queries)
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield f"attention.{name}.weight", (model.head_size,)
    for name in ("attention_norm", "mlp_norm"):
        yield f"{name}.weight", (width,)
    for name in ("gate", "up"):
        yield f"mlp.{name}.weight", (model.ffn, width)
    yield "mlp.down.weight", (width, model.ffn)
