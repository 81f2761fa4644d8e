"""Transformers' Llama with Liger's kernels as one of the implementations."""

from functools import partial
from typing import Any

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

from megalite.base.errors import InputError
from megalite.config.schema import Config
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.huggingface import with_loss
from megalite_tools.bench.training.peers import Runner

LARGE_CHUNKS = 16  # times Liger's own memory of a chunk's logits: chunks of 4,096 tokens and more


def build(case: Case, config: Config, device: torch.device) -> Runner:
    """Liger's training step; all Llamas that are built afterwards have its kernels. Raises InputError on a CPU."""
    if device.type != "cuda":
        raise InputError("liger's kernels need a GPU: Triton's interpreter does not run them")
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)  # it is called directly
    tuned: dict[str, Any] = {"accum_dtype": torch.float32, "chunk_mem_const": LARGE_CHUNKS} if case.tuned else {}
    return with_loss(partial(liger_fused_linear_cross_entropy, reduction="sum", **tuned), case, config, device)
