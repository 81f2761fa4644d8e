"""Experts of Megatron-Core: their tensors as blocks of our weights, and their arguments. Imports no torch.

A rank has two tensors for each of its experts, that of the first layer with gate and up one upon another. `torch_dist`
has one tensor with those of all experts, whatever module computes them. The norm before experts is a module of its own.
An expert that computes every token is as a feed-forward without experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.base.errors import InputError
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.models import first_and_every, has_experts
from megalite.checkpoint.weights.maps.strips import Table, Theirs, part, piled
from megalite.config.model_schema import Experts, Model
from megalite.plan.parts.part import Weight

ROUTER, CORRECTION, NORM = "mlp.router.weight", "mlp.router.expert_bias", "pre_mlp_layernorm"
EXPERTS = "mlp.experts."  # begins the names of tensors of experts
STACKED = f"{EXPERTS}experts."  # and of those that have all experts of a layer
SHARED = "mlp.shared_experts"  # the expert that computes every token
DEFAULTS = {  # values that Megatron takes for arguments that are not there
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_bias_update_rate": 0.001,
}
NEUTRAL_VALUES: dict[str, tuple[Any, str]] = {  # the only value that megalite's experts are made for
    "moe_router_topk_limited_devices": (None, "chooses groups of experts by ranks"),
    "moe_router_force_load_balancing": (False, "chooses experts at random"),
    "moe_router_force_biased": (None, "chooses experts at random"),
    "moe_expert_capacity_factor": (None, "drops tokens"),
    "moe_expert_rank_capacity_factor": (None, "drops tokens"),
    "moe_apply_probs_on_input": (False, "multiplies what experts take by scores"),
    "moe_latent_size": (None, "means experts of a narrower stream"),
    "moe_mlp_glu_interleave_size": (None, "interleaves gate and up"),
}


@dataclass(frozen=True)
class Share:
    """Part of a model that a rank has: of matrices that `tp` ranks share, and of experts.

    experts: their numbers, each with tensors of its own; None: all, in one tensor. split: whether tensor-parallel ranks
    share matrices of experts too.
    """

    rank: int = 0
    tp: int = 1
    experts: range | None = None
    split: bool = True

    def of(self, size: int) -> tuple[int, int]:
        """The first of the `size` rows or columns of a matrix that this rank has, and the one after its last."""
        return size * self.rank // self.tp, size * (self.rank + 1) // self.tp

    def columns(self, name: str, ours: Mapping[str, Weight]) -> Theirs:
        """A rank's columns of a matrix."""
        strip = part(name, ours[name], columns=self.of(ours[name].shape[1]))
        return Theirs((strip.height, strip.width), (strip,))


ALL = Share()


def of_feed_forward(theirs: str, own: str, ours: Mapping[str, Weight], share: Share = ALL) -> dict[str, Theirs]:
    """The tensors of a feed-forward that computes every token. theirs, own: their module, and ours."""
    names = [f"{own}.{name}.weight" for name in ("gate", "up")]
    halves = tuple(part(name, ours[name], rows=share.of(ours[name].shape[0])) for name in names)
    return {
        f"{theirs}.linear_fc1.weight": Theirs((2 * halves[0].height, halves[0].width), halves),
        f"{theirs}.linear_fc2.weight": share.columns(f"{own}.down.weight", ours),
    }


def of_experts(own: str, ours: Mapping[str, Weight], share: Share = ALL) -> Table:
    """The tensors of a layer's experts by their names in the layer; `own` begins the names of our weights."""
    shared = of_feed_forward(SHARED, f"{own}mlp.shared", ours, share) if f"{own}mlp.shared.up.weight" in ours else {}
    names = [f"{own}mlp.experts.{name}.weight" for name in ("gate", "up", "down")]
    (count, hidden, stream), down = ours[names[0]].shape, ours[names[2]]
    first, end = share.of(hidden) if share.split else (0, hidden)

    def fc1(expert: int) -> Theirs:
        rows = expert * hidden + first, expert * hidden + end
        return Theirs((2 * (end - first), stream), tuple(part(name, ours[name], rows) for name in names[:2]))

    def fc2(expert: int) -> Theirs:
        rows = expert * stream, (expert + 1) * stream
        return Theirs((stream, end - first), (part(names[2], down, rows, (first, end)),))

    made = {"linear_fc1.weight": fc1, "linear_fc2.weight": fc2}
    if share.experts is None:
        each = {STACKED + name: piled([make(expert) for expert in range(count)]) for name, make in made.items()}
    else:
        each = {
            f"{EXPERTS}{name}{local}": make(expert)
            for name, make in made.items()
            for local, expert in enumerate(share.experts)
        }
    return shared | each


def experts(fields: Fields, layers: int) -> Experts | None:
    """The experts that arguments tell. Raises InputError for what megalite's do not have."""
    if fields.get("num_experts") is None:
        return None
    fields = Fields(fields.file, {**DEFAULTS, **fields.values})
    for key, (value, why) in NEUTRAL_VALUES.items():
        fields.refuse(key, value, why)
    if fields.get("moe_router_load_balancing_type") in ("sinkhorn", ["sinkhorn"]):
        raise fields.wrong("moe_router_load_balancing_type", "chooses experts otherwise than by their scores")
    scores, active = fields.get("moe_router_score_function"), fields.whole("moe_router_topk")
    if scores not in ("softmax", "sigmoid"):
        raise fields.wrong("moe_router_score_function", "megalite's scores are softmax or sigmoid")
    first_dense, every = _layers(fields, layers)
    groups, active_groups = _groups(fields, scores, active)
    shared = fields.get("moe_shared_expert_intermediate_size") is not None
    corrected = fields.flag("moe_router_enable_expert_bias")
    if corrected and scores == "softmax":
        raise fields.wrong("moe_router_enable_expert_bias", "Megatron has it for sigmoid scores alone")
    return Experts(
        count=fields.whole("num_experts"),
        active=active,
        width=fields.whole("moe_ffn_hidden_size") if fields.get("moe_ffn_hidden_size") is not None else None,
        first_dense=first_dense,
        every=every,
        scores=scores,
        normalize=not fields.flag("moe_router_pre_softmax") if scores == "softmax" else active > 1,
        scale=fields.number("moe_router_topk_scaling_factor", 0.0) or 1.0,
        groups=groups,
        active_groups=active_groups,
        correction_rate=fields.number("moe_router_bias_update_rate") if corrected else None,
        shared_width=fields.whole("moe_shared_expert_intermediate_size") if shared else None,
        shared_gate=shared and fields.flag("moe_shared_expert_gate"),
    )


def _groups(fields: Fields, scores: str, active: int) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token's experts may be in."""
    if fields.get("moe_router_group_topk") is None:
        return 1, 1
    groups, chosen = (fields.whole(f"moe_router_{key}") for key in ("num_groups", "group_topk"))
    best = 2 if scores == "sigmoid" else 1
    if chosen < groups and active // chosen != best:
        rule = f"groups are chosen by their {active // chosen} highest scores, which megalite does by {best}"
        raise fields.wrong("moe_router_group_topk", f"with moe_router_topk = {active} and {scores}, {rule}")
    return groups, chosen


def _layers(fields: Fields, layers: int) -> tuple[int, int]:
    """Return the number of layers at the beginning without experts, and n: every n-th of the others has some."""
    told = fields.get("moe_layer_freq")
    if type(told) is int and told > 0:
        told = [int(number % told == 0) for number in range(layers)]
    if not isinstance(told, list) or len(told) != layers or any(each not in (0, 1) for each in told):
        raise fields.wrong("moe_layer_freq", f"must be a number, or a list of 0 or 1 for each of the {layers} layers")
    found = first_and_every([bool(each) for each in told])
    if found is None:
        rule = "megalite has layers without experts at the beginning, and all but every n-th"
        raise fields.wrong("moe_layer_freq", rule)
    return found


def expert_arguments(model: Model) -> dict[str, Any]:
    """The inverse of `experts`. Raises InputError for what Megatron itself refuses."""
    found, mixed = model.experts, has_experts(model)
    if found is None:
        return {"num_experts": None}
    if found.active == 1 and found.scores == "softmax" and found.normalize:
        rule = "Megatron has no softmax over a single expert; use another kind of files"
        raise InputError(f"model.experts.normalize = true, with model.experts.active = 1: {rule}")
    if found.correction_rate is not None and found.scores == "softmax":
        rule = "Megatron corrects choices by sigmoid scores alone; use another kind of files"
        raise InputError(f"model.experts.correction_rate = {found.correction_rate}: {rule}")
    grouped, corrected = found.groups > 1, found.correction_rate is not None
    return {
        "num_experts": found.count,
        "moe_ffn_hidden_size": found.width or model.ffn,
        "moe_layer_freq": 1 if all(mixed) else [int(each) for each in mixed],
        "moe_router_topk": found.active,
        "moe_router_score_function": found.scores,
        "moe_router_pre_softmax": found.scores == "softmax" and not found.normalize,
        "moe_router_topk_scaling_factor": None if found.scale == 1 else found.scale,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": found.groups if grouped else None,
        "moe_router_group_topk": found.active_groups if grouped else None,
        "moe_router_enable_expert_bias": corrected,
        **({"moe_router_bias_update_rate": found.correction_rate} if corrected else {}),
        "moe_shared_expert_intermediate_size": found.shared_width,
        "moe_shared_expert_gate": found.shared_gate,
        "moe_grouped_gemm": True,
        "expert_tensor_parallel_size": None,
    }
