"""Compares two sources of weights: whether they hold the same model, tensor by tensor, and in what it computes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.errors import InputError
from megalite.checkpoint.store.state import State
from megalite.checkpoint.weights.convert import blocks
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.maps.models import dtype_of
from megalite.checkpoint.weights.maps.strips import PREFIX, stacked
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.targets import SINGLE_DTYPE_KINDS
from megalite.config.layout import Layout
from megalite.distributed.mesh import Mesh
from megalite.distributed.start.host import host_memory
from megalite.distributed.start.start import start_alone
from megalite.model.decoder import Decoder
from megalite.plan.model.weights import weights

TOKENS = 64  # tokens whose logits are computed
MEMORY_FACTOR = 3  # bytes of memory asked for, per byte of what is held of a model in float32


def unequal_tensors(source: Weights, made: Weights, dtype: str | None, advanced: Callable[[int], None]) -> list[str]:
    """The names of tensors of `made`, weights and states, that are not those of `source` in `dtype`; None: as they are.

    advanced: called with the bytes that are compared.
    """
    readers = reader_of(source), reader_of(made)
    forms, one, other = weights(made.model), source.index.tensors, made.index.tensors
    found = sorted(one.keys() ^ other.keys())
    for full in (full for full in other if full in one):
        name = full.removeprefix(PREFIX) if full.startswith(PREFIX) else full.split(".", 2)[2]
        kind = dtype or one[full].dtype
        if dtype or made.kind in SINGLE_DTYPE_KINDS:
            kind = dtype_of(name, kind)
        theirs = replace(stacked([(name, forms[name])]), kind=full.removesuffix(name))
        same = other[full].dtype == kind
        for mine, yours in zip(*(blocks(reader, theirs, kind) for reader in readers), strict=True):
            same = same and torch.equal(mine.view(torch.uint8), yours.view(torch.uint8))
            advanced(yours.nbytes)
        if not same:
            found.append(full)
    return found


def difference_of_logits(source: Weights, made: Weights, given: Sequence[int] | None = None) -> float | None:
    """The largest difference of logits, relative to the largest logit, in float32; None if memory is too small.

    given: the tokens; None: random ones. Raises InputError for tokens that the model does not know or cannot see.
    """
    needed = MEMORY_FACTOR * 4 * sum(weight.elements for weight in weights(replace(made.model, layers=1)).values())
    if needed > host_memory():
        return None
    length, vocabulary = min(TOKENS, made.model.sequence_length), made.model.vocab_size
    if given is None:
        tokens = torch.randint(vocabulary, (length, 1), generator=torch.Generator().manual_seed(0))
    else:
        if max(given) >= vocabulary or len(given) > made.model.sequence_length:
            rule = f"ids must be below {vocabulary:,}, and at most {made.model.sequence_length:,}"
            raise InputError(f"--tokens {max(given)}, {len(given)} of them: {rule}")
        tokens = torch.tensor(given)[:, None]
    start_alone()
    try:
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        one, other = (logits(found, mesh, tokens) for found in (source, made))
    finally:
        dist.destroy_process_group()
    return float((one - other).abs().max() / one.abs().max())


@torch.inference_mode()
def logits(found: Weights, mesh: Mesh, tokens: Tensor) -> Tensor:
    """Logits `[s, 1, v]` of tokens `[s, 1]`. One layer is in memory at a time."""
    x, reader, last = tokens, reader_of(found), found.model.layers - 1
    for layer in range(last + 1):
        stage = Decoder(found.model, mesh.tp, range(layer, layer + 1), layer == 0, layer == last)
        reader.fill(State({layer: stage.to_empty(device="cpu")}).weights())
        x = stage(x)
    return x
