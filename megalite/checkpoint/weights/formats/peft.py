"""Folders of PEFT with an adapter: adapter_config.json and adapter_model.safetensors. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalite.base.errors import InputError, listing
from megalite.base.files import as_json, read_object
from megalite.checkpoint.store.disk import DamagedError, damage_of
from megalite.checkpoint.store.index import ITEM_BYTES, Chunk, Index, Stored
from megalite.checkpoint.weights.formats.huggingface import model_type, write_tensors
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.formats.output import Output, OutputPlan
from megalite.checkpoint.weights.formats.safetensors import one_file
from megalite.checkpoint.weights.maps.families import FAMILIES, MAX_CONFIG_BYTES
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.peft import BEGIN, Module, modules, named, table
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.config.schema import Adapter, Config, Model
from megalite.plan.model.weights import weights
from megalite.plan.parts.adapted import factor_names, target

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(re.escape(BEGIN) + r"(.+\.lora_[AB])(?:\.default)?\.weight")
# Keys of a configuration that are read, or without effect on what a trained adapter computes. Others must be unset.
KNOWN_KEYS = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "base_model_name_or_path", "peft_type", "bias", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
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
    there = {_plain(path, name): stored for name, stored in files.index.tensors.items()}
    known = {name: module for *pair, name, module in named(modules(FAMILIES[model_type(base)], base.model))}
    wanted = {name: module for name, module in known.items() if f"{BEGIN}{name}.lora_A.weight" in there}
    pairs = {each for first, second, *_ in named(wanted) for each in (first, second)}
    if odd := sorted(pairs ^ there.keys()):
        rule = "is there without the other factor" if odd[0] in pairs else "belongs to no matrix of a layer"
        raise DamagedError(path, f"{FILE}: {odd[0]} {rule if odd[0] in there else 'is missing'}")
    ours = weights(base.model)
    targets = {found for module in wanted.values() for each in module.ours if (found := target(each, ours[each]))}
    adapter = Adapter(rank, alpha, rslora, sorted(targets))
    for name, module in known.items():
        if name not in wanted and any(target(each, ours[each]) in targets for each in module.ours):
            rule = f"has factors for {listing(sorted(targets), 'and')}, but none for {name}"
            raise InputError(f"{path / FILE}: {rule}; megalite has them in all layers, or in none")
    with damage_of(path, FILE):
        index = Index.of(_chunks(there, wanted, files.index.files, rank, base.model))
    model = Config(model=base.model, adapter=adapter).model
    firsts = ([PREFIX + factor_names(each)[0] for each in module.ours] for module in wanted.values())
    shared = {name: first for first, *others in firsts for name in others}
    return Weights("peft", path, model, index, files.sizes, FILE, shared=shared), adapter


def plan(found: Weights, dtype: str | None) -> OutputPlan:
    """A folder as PEFT writes it, of the adapter that is merged into `found`; to be written from its factors.

    dtype: of all tensors; None: each keeps its own.
    """
    assert found.merging is not None
    adapter, family = found.merging.adapter, FAMILIES[model_type(found)]
    tensors = table(family, found.model, adapter)
    stored = found.merging.factors.index.tensors
    kinds = {name: dtype or stored[PREFIX + theirs.strips[0].name].dtype for name, theirs in tensors.items()}
    size = sum(theirs.bytes(kinds[name]) for name, theirs in tensors.items())
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(found.path) if found.kind == "hf" else None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "modules_to_save": None,
        "inference_mode": True,
    }
    output = Output(FILE, size, lambda stream, put: write_tensors(tensors, kinds, stream, put))
    return OutputPlan((output,), {CONFIG: as_json(told).encode()})


def _fields(path: Path) -> Fields:
    return Fields(str(path / CONFIG), read_object(path / CONFIG, MAX_CONFIG_BYTES))


def _plain(path: Path, name: str) -> str:
    """A tensor's name without that of the adapter, which PEFT leaves out when it saves."""
    if (found := NAME.fullmatch(name)) is None:
        raise InputError(f"{path / FILE}: {name:.200} is no factor of LoRA")
    return f"{BEGIN}{found[1]}.weight"


def _chunks(
    there: Mapping[str, Stored], wanted: Mapping[str, Module], files: tuple[str, ...], rank: int, model: Model
) -> Iterator[Chunk]:
    """Places of our factors. Matrices that are one module share its first factor."""
    ours = weights(model)
    for first, second, _, module in named(wanted):
        inputs, outputs = ours[module.ours[0]].shape[1], sum(strip.height for strip in module.rows)
        for name, shape in ((first, (rank, inputs)), (second, (outputs, rank))):
            if there[name].shape != shape:
                raise ValueError(f"has {name} {list(there[name].shape)} instead of {list(shape)}")
        stored, file, position = there[first], files[int(there[first].rows[0, 0])], int(there[first].rows[0, 1])
        for name in module.ours:
            yield Chunk(
                PREFIX + factor_names(name)[0], stored.dtype, stored.shape, file, position, (0, 0), stored.shape
            )
        stored, file, position = there[second], files[int(there[second].rows[0, 0])], int(there[second].rows[0, 1])
        for strip in module.rows:
            shape, part = (ours[strip.name].shape[0], rank), (strip.height, rank)
            name = PREFIX + factor_names(strip.name)[1]
            yield Chunk(name, stored.dtype, shape, file, position, (strip.rows[0], 0), part)
            position += strip.height * rank * ITEM_BYTES[stored.dtype]
