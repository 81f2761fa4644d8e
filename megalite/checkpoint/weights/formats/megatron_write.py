"""Helpers for writing both of Megatron-LM's formats."""

import io
from argparse import Namespace
from typing import Any

import torch

from megalite.base.errors import InputError, listing
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.checkpoint.weights.maps.megatron_arguments import arguments_of
from megalite.config.model_schema import Model

DTYPES = ("float32", "bfloat16", "float16")


def saved_arguments(model: Model, split: Split, size: int, dtype: str) -> Namespace:
    """The arguments as Megatron saves them."""
    if dtype not in DTYPES:
        raise InputError(f"weights in {dtype}: Megatron has them in {listing(DTYPES)}; use --dtype fp32")
    return Namespace(**arguments_of(model, split, size, dtype), params_dtype=getattr(torch, dtype))


def pickled(content: Any) -> bytes:
    """A small file, as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
