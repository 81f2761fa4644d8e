"""Experts as transformers has them: their keys in config.json, and their tensors. Imports no torch.

Files have a tensor for every matrix of every expert. In memory, transformers 5 has those of a layer stacked, gate and
up in one, and saves them so if it is told to (`save_original_format=False`); such files are read too. Factors of losses
do not carry over: transformers' loss is another one, and is not computed unless it is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.strips import Theirs, part, piled
from megalite.config.model_schema import Experts, Model
from megalite.plan.parts.part import Weight

CORRECTION_RATE = 0.001  # DeepSeek-V3's training had it (arXiv 2412.19437, §4.2); files do not tell it
EXPERTS = {  # tensors of a layer with experts, `{}` the number of one, and ours
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.experts.{}.gate_proj.weight": ("mlp.experts.gate.weight",),
    "mlp.experts.{}.up_proj.weight": ("mlp.experts.up.weight",),
    "mlp.experts.{}.down_proj.weight": ("mlp.experts.down.weight",),
}
CORRECTION = {"mlp.gate.e_score_correction_bias": ("mlp.router.correction",)}
SHARED = {f"mlp.shared_experts.{name}_proj.weight": (f"mlp.shared.{name}.weight",) for name in ("gate", "up", "down")}
CORRECTED_EXPERTS = {**EXPERTS, **CORRECTION, **SHARED}  # DeepSeek-V3 has these, and families that follow it
STACKED_EXPERTS = {  # the same in every family
    "mlp.gate.weight": ("mlp.router.weight",),
    **CORRECTION,
    **SHARED,
    "mlp.experts.gate_up_proj": ("mlp.experts.gate.weight", "mlp.experts.up.weight"),
    "mlp.experts.down_proj": ("mlp.experts.down.weight",),
}


def are_stacked(names: Iterable[str]) -> bool:
    """Return whether tensors of these names have all experts of a layer in one."""
    return any(name.endswith("mlp.experts.gate_up_proj") for name in names)


def of_experts(name: str, parts: Mapping[str, Weight]) -> Iterator[tuple[str, Theirs]]:
    """Tensors, one for each expert if `name` has a place for its number, of our weights one upon another."""
    (count,) = {weight.shape[0] for weight in parts.values()}
    each = [_of_expert(number, parts) for number in range(count)]
    if "{}" in name:
        yield from ((name.format(number), theirs) for number, theirs in enumerate(each))
    else:
        yield name, piled(each)


def _of_expert(number: int, parts: Mapping[str, Weight]) -> Theirs:
    strips = []
    for name, weight in parts.items():
        _, rows, columns = weight.shape
        strips.append(part(name, weight, rows=(number * rows, (number + 1) * rows)))
    return Theirs((sum(strip.height for strip in strips), columns), tuple(strips))


def experts(fields: Fields, count: int, **more: Any) -> Experts:
    """The experts that a config.json tells; `count`: as many as there are if it does not say, `more`: other keys."""
    # Versions of transformers differ in which of the two names a family has.
    key = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    return Experts(count=fields.whole(key, count), active=fields.whole("num_experts_per_tok"), **more)


def corrected_experts(fields: Fields, **more: Any) -> Experts:
    """The experts of a config.json with the keys of DeepSeek-V3. more: keys of ours in place of what these tell."""
    width, shared = fields.whole("moe_intermediate_size"), fields.get("n_shared_experts", 1)
    if type(shared) is not int or shared < 0:
        raise fields.wrong("n_shared_experts", "must be a whole number or null")
    first_dense = fields.get("first_k_dense_replace", 1)
    if type(first_dense) is not int or first_dense < 0:
        raise fields.wrong("first_k_dense_replace", "must be a whole number")
    found = Experts(
        count=fields.whole("n_routed_experts"),
        active=fields.whole("num_experts_per_tok"),
        width=width,
        first_dense=first_dense,
        scores="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor"),
        groups=fields.whole("n_group", 1),
        active_groups=fields.whole("topk_group", 1),
        correction_rate=CORRECTION_RATE,
        shared_width=width * shared or None,
    )
    return replace(found, **more)


def corrected_fields(model: Model) -> dict[str, Any]:
    """The inverse of `corrected_experts`."""
    found = with_width(model)
    return {
        "moe_intermediate_size": found.width,
        "n_routed_experts": found.count,
        "num_experts_per_tok": found.active,
        "n_shared_experts": (found.shared_width or 0) // (found.width or 1),
        "first_k_dense_replace": found.first_dense,
        "norm_topk_prob": found.normalize,
        "routed_scaling_factor": found.scale,
        "n_group": found.groups,
        "topk_group": found.active_groups,
    }


def with_width(model: Model) -> Experts:
    """The experts of a model that has some, with their width told."""
    assert model.experts is not None  # else no family with experts is asked
    return replace(model.experts, width=model.experts.width or model.ffn)
