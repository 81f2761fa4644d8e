"""Families of presets, and the small job that stands for each of them."""

from dataclasses import replace
from math import isclose, sqrt
from pathlib import Path

from megalite.commands.verify_copy import shrink
from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.config.schema import Batch, Config, Data, Source

# Presets by family. The first one of each, which has all that is special about the family, stands for it.
FAMILIES = {
    "megalite": ("tiny", "tiny_gqa", "tiny_moe", "tiny_olmo", "tiny_qwen", "tiny_tied", "small_60m"),
    "DeepSeek-V2": ("deepseek_v2_lite",),
    "DeepSeek-V3": ("deepseek_v3",),
    "Gemma 2": ("gemma2_2b", "gemma2_9b", "gemma2_27b"),
    "Gemma 3": ("gemma3_4b", "gemma3_1b", "gemma3_12b", "gemma3_27b"),
    "gpt-oss": ("gpt_oss_20b", "gpt_oss_120b"),
    "Llama 2": ("llama2_7b", "llama2_13b"),
    "Llama 3": ("llama3_8b", "llama3_70b", "llama3_405b"),
    "Llama 3.2": ("llama3.2_1b", "llama3.2_3b"),
    "Mistral": ("mistral_7b_v0.1", "mistral_7b"),
    "Mixtral": ("mixtral_8x7b",),
    "OLMo 2": ("olmo2_7b", "olmo2_1b", "olmo2_13b", "olmo2_32b"),
    "OLMo 3": ("olmo3_7b", "olmo3_32b"),
    "OLMoE": ("olmoe_1b_7b",),
    "Qwen3": ("qwen3_8b", "qwen3_0.6b", "qwen3_32b"),
    "Qwen3 MoE": ("qwen3_30b_a3b", "qwen3_235b_a22b"),
    "SmolLM2": ("smollm2_135m",),
    "SmolLM3": ("smollm3_3b",),
}
TENSOR_PARALLEL = ("parallel.pp=2", "parallel.tp=2", "parallel.dp_shard=1")
DATA_PARALLEL = ("parallel.pp=2", "parallel.dp_shard=2")
EXPERT_PARALLEL = (*DATA_PARALLEL, "parallel.ep=2")
BYTES, LENGTH = 256, 64  # vocabulary, and tokens of a sequence
STEPS, RESUMED_AT = 16, 10
BATCH = Batch(micro=2, global_=8)
RATE = 0.005
VERIFY = ("batch.micro=1", "batch.global=8", "run.device=cpu")  # beside the layout, of the preset at full size


def layout_of(preset: str) -> tuple[str, ...]:
    """The keys of the layout of four ranks in which a family is verified and resumed."""
    model = load([preset]).model
    if model.experts is not None:
        return EXPERT_PARALLEL
    return TENSOR_PARALLEL if model.heads % 2 == model.kv_heads % 2 == 0 else DATA_PARALLEL


def small(family: str, store: Path, runs: Path) -> Config:
    """The configuration in float64 that trains a shrunken copy of a family's first preset on the bytes of `store`.

    One rank trains it; its sizes are those that `layout_of` can divide.
    """
    preset = FAMILIES[family][0]
    full = check(load([preset], [*layout_of(preset), *VERIFY]))
    copy = shrink(full)
    model = replace(copy.model, vocab_size=BYTES, sequence_length=LENGTH)
    if isclose(full.model.embedding_multiplier, sqrt(full.model.width)):
        model.embedding_multiplier = sqrt(model.width)
    latent = model.attention.latent
    if latent is not None:  # transformers views pairs of features as complex numbers, which needs even strides
        latent = replace(latent, key_rank=latent.key_rank + latent.key_rank % 2)
        model.attention = replace(model.attention, latent=latent)
    base = Config()
    return replace(
        base,
        run=replace(base.run, dir=str(runs), name="run", device="cpu"),
        model=model,
        batch=BATCH,
        train=replace(base.train, steps=STEPS, precision="fp64"),
        optim=replace(base.optim, lr=RATE),
        schedule=replace(base.schedule, name="constant", warmup=5),
        data=Data(train=[Source(str(store))]),
        checkpoint=replace(base.checkpoint, keep=1),
        log=replace(base.log, tensorboard=False),
    )
