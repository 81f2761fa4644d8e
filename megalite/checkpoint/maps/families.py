"""The families that are known, and which one a folder or a model belongs to. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from megalite.checkpoint.maps.family import Family
from megalite.checkpoint.maps.fields import Fields
from megalite.checkpoint.maps.llama import LLAMA
from megalite.checkpoint.maps.mistral import MISTRAL
from megalite.checkpoint.maps.models import checked, lost
from megalite.checkpoint.maps.olmo2 import OLMO2
from megalite.checkpoint.maps.phi3 import PHI3
from megalite.checkpoint.maps.qwen2 import QWEN2
from megalite.checkpoint.maps.qwen3 import QWEN3
from megalite.checkpoint.maps.smollm3 import SMOLLM3
from megalite.config.errors import InputError, listing
from megalite.config.files import read_object
from megalite.config.schema import Model

CONFIG = "config.json"
LARGEST = 1 << 24  # bytes of a config.json
FAMILIES = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, PHI3)
}  # the first that fits is taken
LACKING = {  # families that people may try, and what of theirs megalite's layers do not have
    "gemma": "GELU, scaled embeddings and norms of 1 + weight",
    "gemma2": "norms after attention and feed-forward, GELU, scaled embeddings, capped logits and norms of 1 + weight",
    "gemma3_text": "norms after attention and feed-forward, GELU, scaled embeddings and two bases of RoPE",
    "gpt2": "learned positions, layer norms with biases, and GELU",
    "gpt_neox": "partial RoPE, layer norms with biases, and GELU",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "olmoe": "experts",
    "gpt_oss": "experts and attention sinks",
    "deepseek_v3": "experts and latent attention",
    "cohere": "parallel attention and feed-forward, and layer norms",
    "granite": "multipliers of embeddings, residuals and logits",
}


def read_config(path: Path) -> tuple[Family, Model]:
    """The family and the model of the Hugging Face folder `path`. Raises InputError, also for what megalite lacks."""
    file = path / CONFIG
    values = read_object(file, LARGEST)
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        lacks = LACKING.get(kind) if isinstance(kind, str) else None
        why = f"needs {lacks}, which megalite's layers lack" if lacks else "is a family that megalite does not know"
        raise InputError(f"{file}: model_type = {kind!r:.100}: {why}; known are {listing(list(FAMILIES), 'and')}")
    return family, checked(family.model(Fields(str(file), values)), str(file))


def family_of(model: Model, preferred: str | None = None) -> Family:
    """A family that can express `model`: the preferred one, if it can. Raises InputError with what none can."""
    found: list[tuple[list[str], Family]] = []
    first = [FAMILIES[preferred]] if preferred in FAMILIES else []
    for family in [*first, *FAMILIES.values()]:
        missing = _lost(family, model)
        if not missing:
            return family
        found.append((missing, family))
    missing, family = min(found, key=lambda pair: len(pair[0]))
    raise InputError(
        f"no family of Hugging Face transformers that megalite knows has this model: {family.model_type}, the nearest, "
        f"cannot express {listing(missing, 'and')}"
    )


def _lost(family: Family, model: Model) -> list[str]:
    """The keys of `model`, with their values, that are not the same after a way through the family's config.json."""
    try:
        again = family.model(Fields(CONFIG, family.config(model, "float32")))
    except InputError as error:
        return [str(error)]
    if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic":
        again = replace(again, sequence_length=model.sequence_length)  # the file tells original_length in its place
    return lost(model, again)
