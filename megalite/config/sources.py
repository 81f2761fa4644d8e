"""Sources and targets of weights: `KIND:PATH`, or a path alone. Imports no torch."""

from pathlib import Path

KINDS = {
    "megalite": "a checkpoint of megalite, or a run folder, of which the newest is taken",
    "hf": "a folder of Hugging Face transformers: config.json and safetensors",
    "megatron": "Megatron's older format: mp_rank_* folders of every tensor- and pipeline-parallel rank",
    "megatron-dist": "Megatron's torch_dist: a folder of PyTorch Distributed Checkpoint",
    "peft": "an adapter of PEFT: adapter_config.json and adapter_model.safetensors",
    "meta": "an original Llama: params.json and consolidated.*.pth",
}


def split_kind(text: str) -> tuple[str | None, Path]:
    """The kind, if `text` names one, and the path."""
    kind, colon, path = text.partition(":")
    return (kind, Path(path)) if colon and kind in KINDS else (None, Path(text))
