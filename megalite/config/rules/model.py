"""Rules of the model section: heads that divide a width, and what tensor parallelism divides."""

from collections.abc import Iterator

from megalite.base.errors import Problem, listing
from megalite.config.model_schema import SCALING_KEYS, Model, RopeScaling
from megalite.config.rules.numbers import divisible


def model_rules(model: Model) -> Iterator[Problem]:
    """Every broken rule of heads and positions."""
    yield from divisible("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    if model.head_width is None:
        yield from divisible("model.width", model.width, "model.heads", model.heads, ", or set model.head_width")
        if model.heads >= 1 and model.head_size % 2:
            rule = f"model.width / model.heads = {model.head_size} must be even, since RoPE turns pairs"
            yield Problem("model.heads", rule, "set model.head_width, or change the number of heads", model.heads)
    elif model.head_width % 2:
        even = [width for width in (model.head_width - 1, model.head_width + 1) if width > 0]
        yield Problem(
            "model.head_width", "must be even, since RoPE turns pairs", f"use {listing(even)}", model.head_width
        )
    if model.rotary_width is not None and model.heads >= 1 and model.rotary_width >= model.head_size:
        rule, fix = f"must be less than the width of a head, {model.head_size}", "use null, which turns all of a head"
        if model.attention.latent is not None:  # which cannot turn all
            fix = "use a smaller even number, or a larger model.head_width"
        yield Problem("model.rotary_width", rule, fix, model.rotary_width)
    elif model.rotary_width is not None and model.rotary_width % 2:
        even = [width for width in (model.rotary_width - 1, model.rotary_width + 1) if 0 < width < model.head_size]
        yield Problem(
            "model.rotary_width", "must be even, since RoPE turns pairs", f"use {listing(even)}", model.rotary_width
        )
    if model.qk_norm_width == "all" and not model.qk_norm:
        fix = "set model.qk_norm=true, or use head"
        yield Problem("model.qk_norm_width", "has no meaning without model.qk_norm", fix, "all")
    attention = model.attention
    for key in ("full_every", "window_rope_theta"):
        if (value := getattr(attention, key)) is not None and attention.window is None:
            rule = "has no meaning without model.attention.window"
            yield Problem(f"model.attention.{key}", rule, "set model.attention.window, or use null", value)
    scaled = model.parametrization != "standard" and model.base is not None and model.base.head_width is not None
    if attention.scale is not None and scaled:
        fix = "use null, or leave model.base.head_width out"
        yield Problem("model.attention.scale", "cannot be used with model.base.head_width", fix, attention.scale)
    yield from _latent(model)
    yield from _experts(model)
    yield from _mtp(model)
    yield from _base(model)
    if model.rope_scaling is not None:
        yield from _rope_scaling(model.rope_scaling, model.rope_theta)
        yield from _of_length(model.rope_scaling, model.rotary_size if model.heads >= 1 else 0)


def _latent(model: Model) -> Iterator[Problem]:
    latent, section, scaling = model.attention.latent, "model.attention.latent", model.rope_scaling
    if latent is None:
        for name in ("mscale", "mscale_all_dim"):
            if scaling is not None and scaling.kind == "yarn" and getattr(scaling, name) is not None:
                rule, fix = f"has no meaning without {section}", "use model.rope_scaling.attention_factor"
                yield Problem(f"model.rope_scaling.{name}", rule, fix, getattr(scaling, name))
        return
    if model.kv_heads != model.heads:
        rule = f"must be model.heads = {model.heads} with {section}, whose heads all have keys and values"
        yield Problem("model.kv_heads", rule, f"use {model.heads}", model.kv_heads)
    if model.rotary_width is None:
        rule = f"is needed for {section}: so many features of a key turn, and are shared by all heads"
        yield Problem("model.rotary_width", rule, "DeepSeek-V3 has 64, of model.head_width = 192", None)
    if model.heads >= 1 and latent.value_width > model.head_size:
        rule = f"must be at most the width of a head, {model.head_size}"
        yield Problem(f"{section}.value_width", rule, value=latent.value_width)
    flags = {f"model.{key}": getattr(model, key) for key in ("qk_norm", "qkv_bias", "out_bias")}
    for key, used in {**flags, "model.attention.sinks": model.attention.sinks}.items():
        if used:
            yield Problem(key, f"cannot be used with {section}", "use false", True)
    if model.attention.scale is not None:
        rule = f"cannot be used with {section}, whose scores model.rope_scaling.mscale_all_dim scales"
        yield Problem("model.attention.scale", rule, "use null", model.attention.scale)
    if model.parametrization != "standard":
        rule = f"cannot be used with {section}: nobody has shown how the rates of its matrices go with the width"
        yield Problem("model.parametrization", rule, "use standard", model.parametrization)


def _experts(model: Model) -> Iterator[Problem]:
    experts, section = model.experts, "model.experts"
    if experts is None:
        return
    if model.activation != "silu":
        rule = f"cannot be used with {section}, whose gates are SwiGLU's, or clamped as {section}.gate says"
        yield Problem("model.activation", rule, "use silu", model.activation)
    if experts.active > experts.count >= 1:
        rule, fix = f"must be at most {section}.count = {experts.count}", f"use {experts.count} or fewer"
        yield Problem(f"{section}.active", rule, fix, experts.active)
    yield from divisible(f"{section}.count", experts.count, f"{section}.groups", experts.groups)
    if experts.active_groups > experts.groups >= 1:
        rule, fix = f"must be at most {section}.groups = {experts.groups}", f"use {experts.groups} or fewer"
        yield Problem(f"{section}.active_groups", rule, fix, experts.active_groups)
    most = experts.count // max(experts.groups, 1) * experts.active_groups
    if 1 <= experts.active_groups < experts.groups and experts.active > most:
        rule = f"must be at most {most}, the experts of {section}.active_groups = {experts.active_groups} groups"
        yield Problem(f"{section}.active", rule, "use fewer, or more groups", experts.active)
    if experts.shared_gate and experts.shared_width is None:
        rule = f"has no meaning without {section}.shared_width"
        yield Problem(f"{section}.shared_gate", rule, "set the width, or use false", True)
    if experts.every >= 1 and model.layers // experts.every * experts.every <= experts.first_dense:
        late, key = experts.first_dense >= model.layers, f"{section}.first_dense"
        key, value = (key, experts.first_dense) if late else (f"{section}.every", experts.every)
        yield Problem(key, f"leaves none of the {model.layers} layers with experts", "use a smaller number", value)
    if model.parametrization != "standard":
        rule = f"cannot be used with {section}: nobody has shown how a router's rate goes with the width"
        yield Problem("model.parametrization", rule, "use standard", model.parametrization)


def _mtp(model: Model) -> Iterator[Problem]:
    if model.mtp is None:
        return
    if model.mtp.depth >= model.sequence_length:
        rule = f"must be less than model.sequence_length = {model.sequence_length}: else no token is so far ahead"
        yield Problem("model.mtp.depth", rule, "DeepSeek-V3 has 1", model.mtp.depth)
    if model.parametrization != "standard":
        rule = "cannot be used with model.mtp: nobody has shown how the rate of its projection goes with the width"
        yield Problem("model.parametrization", rule, "use standard", model.parametrization)


def _base(model: Model) -> Iterator[Problem]:
    """The sizes that a parametrization compares the model's with."""
    name, base = model.parametrization, model.base
    if name != "standard" and (base is None or base.width is None):
        rule = f"is needed for model.parametrization = {name}, which scales with the width over that of a base"
        yield Problem("model.base.width", rule, "give the width at which optim.lr was chosen", None)
    if name == "completep" and (base is None or base.layers is None):
        rule = "is needed for model.parametrization = completep, which scales with the depth over that of a base"
        yield Problem("model.base.layers", rule, "give the layers of the model at which optim.lr was chosen", None)


def _rope_scaling(scaling: RopeScaling, theta: float) -> Iterator[Problem]:
    section, plain = "model.rope_scaling", RopeScaling(scaling.kind, scaling.factor)
    for name, value in vars(scaling).items():
        if name not in SCALING_KEYS[scaling.kind] and value != getattr(plain, name):
            kinds = [kind for kind, names in SCALING_KEYS.items() if name in names]
            fix = f"leave it out, or use kind {listing(kinds)}"
            yield Problem(f"{section}.{name}", f"has no meaning with {section}.kind = {scaling.kind}", fix, value)
    if scaling.kind == "llama3" and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        rule = f"must be less than {section}.high_frequency_factor = {scaling.high_frequency_factor}"
        fix = "Llama 3.1 uses 1 and 4"
        yield Problem(f"{section}.low_frequency_factor", rule, fix, scaling.low_frequency_factor)
    if scaling.kind == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        rule = f"must be less than {section}.beta_fast = {scaling.beta_fast}"
        yield Problem(f"{section}.beta_slow", rule, "YaRN uses 32 and 1", scaling.beta_slow)
    if scaling.kind == "yarn" and theta == 1:
        rule = f"must be above 1 with {section}.kind = yarn, which looks for pairs by their frequency"
        yield Problem("model.rope_theta", rule, "Llama 2 uses 10000", theta)


def _of_length(scaling: RopeScaling, rotary_size: int) -> Iterator[Problem]:
    """Every broken rule of the kinds whose wavelengths depend on the length of a sequence."""
    section = "model.rope_scaling"
    if scaling.kind == "dynamic" and rotary_size == 2:
        rule = "has no meaning where a single pair of features turns, the fastest, which it never stretches"
        yield Problem("model.rope_scaling.kind", rule, "use linear", scaling.kind)
    if scaling.kind != "longrope":
        return
    if scaling.original_length == 1 and scaling.attention_factor is None:
        rule = f"must be at least 2 without {section}.attention_factor, which is found by its logarithm"
        yield Problem(f"{section}.original_length", rule, value=1)
    for name in ("short_factors", "long_factors"):
        found, pairs = getattr(scaling, name), rotary_size // 2
        if found is None or len(found) != pairs:
            rule = f"must be a list of {pairs} numbers with {section}.kind = longrope, one for each pair that turns"
            yield Problem(f"{section}.{name}", rule if found is None else f"has {len(found)} numbers; {rule}")
        elif any(not 1e-3 <= factor <= 10**6 for factor in found):
            yield Problem(f"{section}.{name}", "must be numbers from 0.001 to 1,000,000", "", found)
