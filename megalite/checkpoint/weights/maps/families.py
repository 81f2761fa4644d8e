"""The families that are known, and which one a folder or a model belongs to. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from megalite.base.errors import InputError, listing
from megalite.base.files import read_object
from megalite.checkpoint.weights.maps.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.gemma import GEMMA, GEMMA2, GEMMA3
from megalite.checkpoint.weights.maps.glm4_moe import GLM4_MOE
from megalite.checkpoint.weights.maps.gpt_oss import GPT_OSS
from megalite.checkpoint.weights.maps.llama import LLAMA
from megalite.checkpoint.weights.maps.mistral import MISTRAL
from megalite.checkpoint.weights.maps.mixtral import MIXTRAL
from megalite.checkpoint.weights.maps.models import checked, lost
from megalite.checkpoint.weights.maps.olmo2 import OLMO2
from megalite.checkpoint.weights.maps.olmo3 import OLMO3
from megalite.checkpoint.weights.maps.olmoe import OLMOE
from megalite.checkpoint.weights.maps.phi3 import PHI3
from megalite.checkpoint.weights.maps.qwen2 import QWEN2
from megalite.checkpoint.weights.maps.qwen3 import QWEN3
from megalite.checkpoint.weights.maps.qwen3_moe import QWEN3_MOE
from megalite.checkpoint.weights.maps.smollm3 import SMOLLM3
from megalite.config.model_schema import Model

CONFIG = "config.json"
MAX_CONFIG_BYTES = 1 << 24  # bytes of a config.json
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        SMOLLM3,
        OLMO2,
        OLMO3,
        PHI3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        GLM4_MOE,
        GPT_OSS,
        DEEPSEEK_V3,
        DEEPSEEK_V2,
    )
}  # the first that fits is taken
TEXT_PARTS = {"gemma3": "gemma3_text"}  # families with images, and those of their text part, which alone is read
LLAMA4 = (
    "attention in chunks, queries that are scaled by their positions, norms of queries and keys without weights, RoPE "
    "of neighbouring features, and experts whose inputs are multiplied by scores"
)
UNSUPPORTED_FAMILIES = {  # families that people may try, and what of theirs megalite's layers do not have
    "apertus": "the activation xIELU without a gate",
    "arcee": "squared ReLU without a gate",
    "bert": "attention to later tokens, learned positions, layer norms with biases, and GELU without a gate",
    "bitnet": "squared ReLU, norms inside of attention and feed-forward, and weights of three values",
    "bloom": "ALiBi, layer norms with biases, and GELU",
    "cohere": "parallel attention and feed-forward, layer norms, and RoPE of neighbouring features",
    "cohere2": "parallel attention and feed-forward, layer norms, and RoPE of neighbouring features",
    "dbrx": "layer norms, and queries, keys and values that are clipped",
    "ernie4_5": "RoPE of neighbouring features",
    "falcon": "parallel attention and feed-forward, layer norms with biases, and GELU",
    "falcon_h1": "state-space layers",
    "gemma3n": "images, sound, an embedding for every layer, and GELU of a few features",
    "glm": "RoPE of neighbouring features",
    "glm4": "RoPE of neighbouring features",
    "gpt2": "learned positions, layer norms with biases, and GELU",
    "gpt_neox": "parallel attention and feed-forward, layer norms with biases, and GELU",
    "gptj": "parallel attention and feed-forward, layer norms with biases, GELU, and RoPE of neighbouring features",
    "granite": "multipliers of residuals",
    "granitemoe": "multipliers of residuals",
    "helium": "RoPE of neighbouring features",
    "jamba": "state-space layers",
    "llama4": f"images, {LLAMA4}",
    "llama4_text": LLAMA4,
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "ministral3": "queries that are scaled by their positions",
    "mistral3": "images",
    "mpt": "ALiBi, layer norms, and GELU",
    "nemotron": "squared ReLU without a gate, and layer norms of 1 + weight",
    "olmo": "layer norms, which have no weights",
    "opt": "learned positions, layer norms with biases, and ReLU",
    "phi": "parallel attention and feed-forward, layer norms with biases, and GELU",
    "phi4_multimodal": "images, sound and low-rank adapters",
    "phimoe": "layer norms with biases, and scores of experts that are masked by thresholds",
    "qwen2_5_vl": "images",
    "qwen2_vl": "images",
    "qwen3_5": "images and linear attention",
    "qwen3_next": "linear attention",
    "qwen3_vl": "images",
    "stablelm": "layer norms with biases",
    "starcoder2": "layer norms with biases, biases of all projections, and GELU without a gate",
    "t5": "an encoder, and learned distances in place of positions",
}


def read_config(path: Path) -> tuple[Family, Model]:
    """The family and the model of the Hugging Face folder `path`. Raises InputError, also for what megalite lacks."""
    file = path / CONFIG
    values = read_object(file, MAX_CONFIG_BYTES)
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in TEXT_PARTS:
        text, how = Fields(str(file), values).section("text_config"), "quantization_config"
        kind, values = TEXT_PARTS[kind], {how: values.get(how), **(text or {})}
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        lacks = UNSUPPORTED_FAMILIES.get(kind) if isinstance(kind, str) else None
        why = f"needs {lacks}, which megalite's layers lack" if lacks else "is a family that megalite does not know"
        raise InputError(f"{file}: model_type = {kind!r:.100}: {why}; known are {listing(list(FAMILIES), 'and')}")
    return family, checked(family.model(Fields(str(file), values)), str(file))


def family_of(model: Model, preferred: str | None = None) -> Family:
    """A family that can express `model`: the preferred one, if it can. Raises InputError with what none can."""
    found: list[tuple[list[str], Family]] = []
    first = [FAMILIES[preferred]] if preferred in FAMILIES else []
    for family in [*first, *FAMILIES.values()]:
        mixes = bool(family.experts) and not (family.dense and model.experts is None)
        if family.latent != (model.attention.latent is not None) or mixes != (model.experts is not None):
            continue
        missing = _lost(family, model)
        if not missing:
            return family
        found.append((missing, family))
    missing, family = min(found, key=lambda pair: len(pair[0]))
    fix = "; megalite-convert --without-mtp leaves these layers out" if model.mtp and not family.predicts_more else ""
    raise InputError(
        f"no family of Hugging Face transformers that megalite knows has this model: {family.model_type}, the nearest, "
        f"cannot express {listing(missing, 'and')}{fix}"
    )


def is_known(model: Model) -> bool:
    """Return whether a family can express `model`."""
    try:
        family_of(model)
    except InputError:
        return False
    return True


def _lost(family: Family, model: Model) -> list[str]:
    """The keys of `model`, with their values, that are not the same after a way through the family's config.json."""
    try:
        again = family.model(Fields(CONFIG, family.config(model, "float32")))
    except InputError as error:
        return [str(error)]
    if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic":
        again = replace(again, sequence_length=model.sequence_length)  # the file tells original_length in its place
    return lost(model, again)
