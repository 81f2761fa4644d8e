"""Activation recomputation (Chen et al. 2016, arXiv 1604.06174): memory for one more forward of each layer."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(layer: nn.Module) -> None:
    """Keep only the inputs of `layer` for backward, in place. Call it before FSDP2 wraps the layer."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
