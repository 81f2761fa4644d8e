"""States of Megatron's modules beside their tensors, of Transformer Engine's for example. Imports no torch."""

from collections.abc import Iterator, Sequence
from itertools import product

from megalite.checkpoint.weights.maps.megatron import FC1, FC2, LAYERS, QKV, alike
from megalite.checkpoint.weights.maps.megatron_experts import NORM, SHARED, STACKED
from megalite.checkpoint.weights.maps.megatron_latent import MAKING_LATENTS, OF_LATENTS
from megalite.checkpoint.weights.maps.models import has_experts
from megalite.config.model_schema import Model

STATEFUL_MODULES = ("self_attention.linear_proj", "self_attention.core_attention")


def extra_states(model: Model) -> Iterator[str]:
    """The names of states that modules may ask for: Megatron loads no folder that lacks one."""
    norms = ("self_attention.q_layernorm", "self_attention.k_layernorm") if model.qk_norm else ()
    attention = [QKV]
    if model.attention.latent is not None:
        matrices = (name.removesuffix(".weight") for name in (*OF_LATENTS, *MAKING_LATENTS))
        attention = ["input_layernorm", *matrices]
    for number, mixed in enumerate(has_experts(model)):
        prefix, places, sizes = (LAYERS, (number,), (model.layers,)) if alike(model) else (f"{LAYERS}{number}.", (), ())
        for name in (*attention, *STATEFUL_MODULES, *norms, *((NORM,) if mixed else (FC1, FC2))):
            yield _state_of(f"{prefix}{name}", places or (0,), sizes or (1,))
        if mixed and model.experts is not None and model.experts.shared_width is not None:
            for name in (FC1, FC2):
                yield _state_of(f"{prefix}{name.replace('mlp', SHARED)}", places or (0,), sizes or (1,))
        if mixed and model.experts is not None:
            for name, expert in product((FC1, FC2), range(model.experts.count)):
                name = f"{prefix}{STACKED}{name.removeprefix('mlp.')}"
                yield _state_of(name, (*places, expert), (*sizes, model.experts.count))
    yield _state_of("decoder.final_layernorm", (0,), (1,))


def _state_of(module: str, places: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of a module's state. places: number of its layer and expert among the `sizes` of these."""
    place, size = (".".join(map(str, numbers)) for numbers in (places, sizes))
    return f"{module}._extra_state/shard_{place}_{size}"
