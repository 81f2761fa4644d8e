"""Folders of PEFT with an adapter: adapter_config.json and adapter_model.safetensors. Imports no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from megalite.base.errors import InputError, listing
from megalite.base.files import as_json, read_object
from megalite.checkpoint.store.disk import DamagedError, damage_of, opened, read_at
from megalite.checkpoint.store.index import ITEM_BYTES, Index, Stored
from megalite.checkpoint.weights.formats.huggingface import model_type, write_tensors
from megalite.checkpoint.weights.formats.opened import COPY, Weights
from megalite.checkpoint.weights.formats.output import Output, OutputPlan
from megalite.checkpoint.weights.formats.safetensors import one_file
from megalite.checkpoint.weights.maps.families import FAMILIES, MAX_CONFIG_BYTES
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.folded import folded
from megalite.checkpoint.weights.maps.peft import BEGIN, Factor, Module, Within, adapted, modules
from megalite.checkpoint.weights.maps.strips import PREFIX, Theirs, under_our_names
from megalite.config.model_schema import Adapter, Model
from megalite.config.schema import Config
from megalite.plan.model.weights import held_weights, weights
from megalite.plan.parts.adapted import factor_names, target

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
ANY, PATH = r".*\.", re.compile(r"\w+(\.\w+)*")  # a beginning of PEFT's own patterns; a name of modules
NAME = re.compile(
    re.escape(BEGIN) + r"(.+\.)"
    r"(?:(lora_[AB])(?:\.default)?(\.weight)|(lora_embedding_[AB])(?:\.default)?|(lora_magnitude_vector)(?:\.default)?)"
)
COPIED = ".base_layer.weight"  # ends the names of copies of the base that PEFT saves beside factors of its two ends
# Keys of a configuration that are read, or without effect on what a trained adapter computes. Others must be unset.
KNOWN_KEYS = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "use_dora", "peft_type", "bias"),
        *("base_model_name_or_path", "init_lora_weights"),
        *(
            "target_modules",
            "target_parameters",
            "rank_pattern",
            "alpha_pattern",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "lora_dropout",
        ),
        *("auto_mapping", "revision", "task_type", "inference_mode", "peft_version", "qalora_group_size"),
        *("megatron_config", "megatron_core", "loftq_config", "corda_config", "eva_config", "lora_ga_config"),
    )
)
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base as it is


def base_of(path: Path) -> str:
    """The base that a folder names, as a source of weights. Raises InputError if there is no such folder here."""
    fields = _fields(path)
    name = fields.get("base_model_name_or_path")
    if isinstance(name, str) and name and Path(name).is_dir():
        return f"hf:{name}"
    raise InputError(
        f"{path / CONFIG}: base_model_name_or_path = {name!r:.200}: is no folder here; give --base KIND:PATH"
    )


def open_folder(path: Path, base: Weights) -> tuple[Weights, Adapter]:
    """The factors in a folder by our names, and the adapter that they are, beside a `base`.

    Raises InputError for what megalite does not have, and DamagedError for damaged files.
    """
    _refuse_multipliers(base.path, folded(base.model)[1])
    fields = _fields(path)
    fields.refuse("peft_type", "LORA", "is another kind of adapter")
    fields.refuse("bias", "none", "means biases that were trained")
    if fields.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise fields.wrong(
            "init_lora_weights", "means a base that was changed at the beginning; save it converted to LoRA"
        )
    for key in fields.values:
        if key not in KNOWN_KEYS and fields.get(key):
            raise fields.wrong(key, "is more than LoRA's factors, which are all that megalite has")
    rank, alpha, rslora = fields.whole("r"), fields.number("lora_alpha", 8.0), fields.flag("use_rslora")
    files = one_file(path, FILE)
    if base.model.tie_embeddings and any(".lora_embedding_" in name for name in files.index.tensors):
        rule = "has factors of the embedding, whose weight is the head's too, so that they cannot be merged into it"
        raise InputError(f"{path / FILE}: {rule}; megalite refuses them")
    known = modules(FAMILIES[model_type(base)], base.model)
    copied = {f"{BEGIN}{module.name}{COPIED}": COPY + module.ours[0] for module in known}
    there = {copied.get(name) or _plain(path, name): stored for name, stored in files.index.tensors.items()}
    wanted = [module for module in known if module.factors[0] in there]
    dora = fields.flag("use_dora")
    pairs = {name for module in wanted for name in (*module.factors, *[module.magnitude] * dora)}
    if odd := sorted(pairs ^ {name for name in there if not name.startswith(COPY)}):
        rule = (
            "is there without the others of its module" if odd[0] in pairs else "belongs to no matrix that may have any"
        )
        raise DamagedError(path, f"{FILE}: {odd[0]} {rule if odd[0] in there else 'is missing'}")
    ours = weights(base.model)
    targets = {found for module in wanted for each in module.ours if (found := target(each, ours[each]))}
    if dora and targets & {"embedding", "head", "experts"}:
        raise fields.wrong("use_dora", "means norms of the embedding's, the head's or experts' rows; megalite has none")
    adapter = Adapter(rank, alpha, rslora, dora, sorted(targets))
    for module in known:
        if module not in wanted and any(target(each, ours[each]) in targets for each in module.ours):
            rule = f"has factors for {listing(sorted(targets), 'and')}, but none for {module.name}"
            raise InputError(f"{path / FILE}: {rule}; megalite has them in all layers, or in none")
    for module in wanted:
        _refuse_left_out(fields, module)
    shares = {module: _shares(fields, module, adapter) for module in wanted}
    opened = _opened(path, base.model, adapter, shares, Index(files.index.files, there), files.sizes)
    return replace(opened, norms=(-1, base) if dora else None), adapter


def modules_with_factors(base: Weights, adapter: Adapter) -> list[Module]:
    """The modules in which PEFT has an adapter's factors. base: folded. Raises InputError for what it cannot have."""
    _refuse_multipliers(base.path, base.factors)
    return adapted(FAMILIES[model_type(base)], base.model, adapter)


def plan(found: Weights, dtype: str | None) -> OutputPlan:
    """A folder as PEFT writes it, of the adapter that is merged into `found`; to be written from its factors.

    dtype: of all tensors; None: each keeps its own.
    """
    assert found.merging is not None
    adapter, factors = found.merging.adapter, found.merging.factors
    held = held_weights(Config(model=found.model, adapter=adapter).model)
    tensors, ranks, alphas = dict[str, Theirs](), dict[str, int](), dict[str, float]()
    chosen = modules_with_factors(found, adapter)
    for module in chosen:
        first, *others = (PREFIX + factor_names(each)[0] for each in module.ours)
        shares = all(factors.shared.get(name) == first for name in others)
        tensors |= module.table(adapter, held, shares)
        if not shares:
            ranks[module.short] = adapter.rank * len(module.ours)
            alphas[module.short] = _alpha(adapter, ranks[module.short])
    stored = factors.index.tensors
    kinds = {name: dtype or stored[PREFIX + theirs.of].dtype for name, theirs in tensors.items()}
    size = sum(theirs.bytes(kinds[name]) for name, theirs in tensors.items())
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(found.path) if found.kind == "hf" else None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({module.short for module in chosen if not module.experts}),
        "target_parameters": sorted({f"mlp.experts.{module.short}" for module in chosen if module.experts}) or None,
        "modules_to_save": None,
        "inference_mode": True,
    }
    output = Output(FILE, size, lambda stream, put: write_tensors(tensors, kinds, stream, put))
    return OutputPlan((output,), {CONFIG: as_json(told).encode()})


def _refuse_multipliers(path: Path, factors: Mapping[str, float]) -> None:
    """Raises InputError where weights of a base are multiplied for other programs: factors would have to be, too."""
    if factors:
        rule = "the model has multipliers, which go into its weights for other programs, but not into PEFT's factors"
        raise InputError(f"{path}: {rule}; merge the adapter, or train it beside this model converted to hf:PATH")


def _alpha(adapter: Adapter, rank: float) -> float:
    """The alpha with which factors of another rank have the scale of an adapter."""
    more = rank / adapter.rank
    return adapter.alpha * (math.sqrt(more) if adapter.rslora else more)


def _refuse_left_out(fields: Fields, module: Module) -> None:
    """Raises InputError if PEFT would not use the factors of a module: a list of names does not choose it."""
    chosen, left_out, layers = (fields.get(key) for key in ("target_modules", "exclude_modules", "layers_to_transform"))
    name, rule = f".{module.name}", f"leaves out {module.name}, whose factors are in {FILE}"
    if isinstance(chosen, list) and not module.experts and not any(name.endswith(f".{each}") for each in chosen):
        raise fields.wrong("target_modules", rule)
    if isinstance(left_out, list) and any(name.endswith(f".{each}") for each in left_out):
        raise fields.wrong("exclude_modules", rule)
    layer = re.search(r"\.(\d+)\.", name)
    if layers is not None and layer and int(layer[1]) not in (layers if isinstance(layers, list) else [layers]):
        raise fields.wrong("layers_to_transform", rule)


def _shares(fields: Fields, module: Module, adapter: Adapter) -> bool:
    """Return whether matrices of a module have one first factor, by the rank that a folder has for it.

    Raises InputError for another rank than one of these, and for another scale than the adapter's.
    """
    rank = _in_pattern(fields, "rank_pattern", module, adapter.rank)
    alpha = _in_pattern(fields, "alpha_pattern", module, adapter.alpha)
    if rank not in (adapter.rank, adapter.rank * len(module.ours)):
        raise fields.wrong("rank_pattern", f"has {rank:g} for {module.name}; megalite has one rank in all modules")
    if not math.isclose(alpha, _alpha(adapter, rank), rel_tol=1e-9):
        raise fields.wrong("alpha_pattern", f"scales {module.name} otherwise; megalite has one scale in all modules")
    return rank == adapter.rank


def _in_pattern(fields: Fields, key: str, module: Module, default: float) -> float:
    """Return the value that a pattern has for a module, by the first of its names that ends the module's.

    Raises InputError for a pattern that is no name.
    """
    for pattern, value in (fields.section(key) or {}).items():
        name = pattern.removeprefix(ANY).replace("\\", "")
        if not PATH.fullmatch(name):
            raise fields.wrong(key, "has a pattern; megalite knows names of modules", pattern)
        if f".{module.name}".endswith(f".{name}"):
            return fields.number(key, within={key: value})
    return default


def _opened(
    path: Path, model: Model, adapter: Adapter, shares: Mapping[Module, bool], there: Index, sizes: Mapping[str, int]
) -> Weights:
    """Our factors in the file of a folder, and copies of the base's tensors.

    shares: whether matrices of a module have one first factor, by module. there: of the file, of these `sizes`.
    """
    held = held_weights(Config(model=model, adapter=adapter).model)
    first, shared, within = dict[str, Theirs](), dict[str, str](), dict[str, Within]()
    with damage_of(path, FILE):
        for module, one_first in shares.items():
            for name, theirs in module.table(adapter, held, one_first).items():
                if there.tensors[name].shape != theirs.shape:
                    raise ValueError(f"has {name} {list(there.tensors[name].shape)} instead of {list(theirs.shape)}")
                if not isinstance(theirs, Factor):
                    first[name] = theirs
                    continue
                within |= {PREFIX + ours: Within(there, name, theirs, ours) for ours in theirs.columns}
            if one_first:
                one, *others = (PREFIX + factor_names(each)[0] for each in module.ours)
                shared |= dict.fromkeys(others, one)
        index = under_our_names(there, first, held, PREFIX)
    for where in {where.name: where for where in within.values()}.values():
        if not _is_diagonal(path, where):
            rule = f"{where.name} is not 0 outside of blocks, so it is no adapter of each of"
            raise InputError(f"{path / FILE}: {rule} {listing(list(where.theirs.columns), 'and')}; merge it with PEFT")
    tensors = {name: stored for name, stored in there.tensors.items() if name.startswith(COPY)}
    tensors |= {**index.tensors, **{name: index.tensors[one] for name, one in shared.items()}}
    for name, where in within.items():
        shape = held[where.ours].shape
        empty = np.empty((0, 2 + 2 * len(shape)), np.int64)
        tensors[name] = Stored(there.tensors[where.name].dtype, shape, empty)
    made = Config(model=model, adapter=adapter).model
    return Weights("peft", path, made, Index(there.files, tensors), sizes, FILE, woven=within, shared=shared)


def _is_diagonal(path: Path, where: Within) -> bool:
    """Read a second factor, and return whether it is 0 outside of the columns that each of our matrices has."""
    theirs, stored = where.theirs, where.index.tensors[where.name]
    if len(set(theirs.columns.values())) == 1:
        return True
    data = bytearray(stored.bytes)
    with opened(path, FILE, links=True) as descriptor:
        read_at(path, FILE, descriptor, memoryview(data), int(stored.rows[0, 1]))
    whole = np.frombuffer(data, f"u{ITEM_BYTES[stored.dtype]}").reshape(theirs.shape[0], -1, theirs.experts or 1)
    for strip, rows in theirs.rows():
        first = theirs.columns[strip.name]
        whole[rows, first : first + strip.width] = 0
    return not (whole << 1).any()  # but for the sign of 0


def _fields(path: Path) -> Fields:
    return Fields(str(path / CONFIG), read_object(path / CONFIG, MAX_CONFIG_BYTES))


def _plain(path: Path, name: str) -> str:
    """A tensor's name without that of the adapter, which PEFT leaves out when it saves."""
    if (found := NAME.fullmatch(name)) is None:
        raise InputError(f"{path / FILE}: {name:.200} is no factor of LoRA")
    return BEGIN + "".join(part for part in found.groups() if part)
