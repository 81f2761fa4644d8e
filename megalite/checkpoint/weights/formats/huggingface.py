"""Folders of Hugging Face transformers. Imports no torch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megalite.base.errors import InputError
from megalite.base.files import as_json, read_object
from megalite.checkpoint.store.disk import DamagedError, damage_of, opened
from megalite.checkpoint.store.index import Index, Stored
from megalite.checkpoint.weights.formats.opened import Weights, refuse_differences
from megalite.checkpoint.weights.formats.output import Output, OutputPlan, Put, Stream
from megalite.checkpoint.weights.formats.safetensors import INDEX, ONE_FILE, Files, find, header, listed
from megalite.checkpoint.weights.formats.tokenizer import tokenizer_files
from megalite.checkpoint.weights.maps.experts import are_stacked
from megalite.checkpoint.weights.maps.families import CONFIG, MAX_CONFIG_BYTES, TEXT_PARTS, family_of, read_config
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.models import dtype_of, has_experts, lost
from megalite.checkpoint.weights.maps.strips import PREFIX, Table, under_our_names
from megalite.checkpoint.weights.maps.woven import places, tensors_of
from megalite.config.model_schema import Model
from megalite.plan.model.weights import weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PIECE = 1 << 22  # bytes compared at a time
SHARD_BYTES = 5_000_000_000  # bytes of a file, as the hub advises
IGNORED_TENSORS = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq)")  # older files have these
IMAGE_TENSORS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")  # in folders of models with images
TEXT_TENSORS = re.compile(r"(?:language_model\.model|model\.language_model)\.(.+)|language_model\.(lm_head\..+)")
LAYER_TENSOR = re.compile(r"model\.layers\.(\d{1,6})\.")
COMPANIONS = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\..*|README\.md|LICENSE.*|NOTICE.*|USE_POLICY.*|model\.safetensors\.index\.json"
)


def open_folder(path: Path) -> Weights:
    """The weights in a folder. Raises InputError for a model that megalite lacks, DamagedError for damaged files."""
    family, model = read_config(path)
    files = _of_text(find(path))
    if f"model.layers.{model.layers}.eh_proj.weight" not in files.index.tensors:  # as in folders of transformers
        model = replace(model, mtp=None)
    stacked = family.woven or are_stacked(files.index.tensors)
    _refuse_too_few(path, files, model, stacked)
    table = family.table(model, stacked)
    found = {
        name: stored
        for name, stored in files.index.tensors.items()
        if name in table or not (IGNORED_TENSORS.fullmatch(name) or _is_beyond(name, family, model))
    }
    copied = family.table(model, stacked, copies=True)
    copies = {name: found.pop(name) for name in copied.keys() - table.keys() & found.keys()}
    head = found.pop(HEAD, None) if model.tie_embeddings else None
    there = Index(files.index.files, found)
    refuse_differences(path, files.source, found.keys(), list(tensors_of(table, there)))
    if head is not None and not _same(path, files.index.files, head, found[EMBEDDING]):
        rule = f"{HEAD} is not {EMBEDDING}, though {CONFIG} ties them"
        raise DamagedError(path, f"{rule}; set tie_word_embeddings to false there if they differ on purpose")
    originals = {made.of: name for name, made in table.items()}
    for name, copy in copies.items():
        if not _same(path, files.index.files, copy, found[of := originals[copied[name].of]]):
            raise DamagedError(path, f"{name} is not {of}, which layers of multi-token prediction share")
    with damage_of(path, files.source):
        plain = {name: theirs for name, theirs in table.items() if not theirs.turns}
        index = under_our_names(there, plain, weights(model), PREFIX)
        more, woven = places(there, table, weights(model))
        index = Index(index.files, {**index.tensors, **more})
    return Weights(
        "hf",
        path,
        model,
        index,
        files.sizes,
        files.source,
        family=family.model_type,
        companions=companions(path),
        woven=woven,
    )


def _of_text(files: Files) -> Files:
    """The files without tensors for images; those of the text part have the names that they have in a model of text."""

    def name(theirs: str) -> str:
        found = TEXT_TENSORS.fullmatch(theirs)
        return theirs if found is None else found[2] or f"model.{found[1]}"

    tensors = {name(each): at for each, at in files.index.tensors.items() if not IMAGE_TENSORS.fullmatch(each)}
    return replace(files, index=Index(files.index.files, tensors))


def _is_beyond(name: str, family: Family, model: Model) -> bool:
    """Return whether a tensor is of a layer after the last, which predicts further tokens; transformers ignores it."""
    found = LAYER_TENSOR.match(name)
    return family.predicts_more and found is not None and int(found[1]) >= model.layers + model.depth


def _refuse_too_few(path: Path, files: Files, model: Model, stacked: bool) -> None:
    """Raises DamagedError before a table is made of billions of experts that a wrong number in CONFIG means."""
    layers = sum(has_experts(model))
    least = layers if stacked or model.experts is None else layers * model.experts.count
    if (there := len(files.index.tensors)) < least:
        raise DamagedError(
            path, f"{files.source} has {there:,} tensors, fewer than the {least:,} of {CONFIG}'s experts"
        )


def _same(path: Path, files: Sequence[str], one: Stored, other: Stored) -> bool:
    """Return whether two tensors, each in one piece in a file, are the same to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    (first, start), (second, begin) = ((files[each.rows[0, 0]], int(each.rows[0, 1])) for each in (one, other))
    with opened(path, first, links=True) as a, opened(path, second, links=True) as b:
        for done in range(0, one.bytes, PIECE):
            count = min(PIECE, one.bytes - done)
            if os.pread(a, count, start + done) != os.pread(b, count, begin + done):
                return False
    return True


def plan(found: Weights, dtype: str | None, shard: int | None) -> OutputPlan:
    """A folder as transformers writes it.

    dtype: of all tensors; None: each keeps its own. shard: bytes of a file at most, unless one tensor has more; None:
    as in the folder that the weights once came from, or SHARD_BYTES. Raises InputError if no family has such a model.
    """
    beside = {file.name: file for file in found.companions}
    family, fields = _family(found, beside.get(CONFIG))
    table = family.table(found.model, copies=True)
    kept = {name: found.index.tensors[PREFIX + theirs.of].dtype for name, theirs in table.items()}
    kinds = kept if dtype is None else {name: dtype_of(theirs.of, dtype) for name, theirs in table.items()}
    texts: dict[str, bytes] = {}
    files = None if shard is not None or INDEX not in beside else _as_before(beside[INDEX], table)
    if files is not None and kinds != kept:
        del beside[INDEX]  # it tells the bytes of all tensors
        texts[INDEX] = _index(files, table, kinds)
    if files is None:
        beside.pop(INDEX, None)
        files = _split(table, kinds, shard or SHARD_BYTES)
        if len(files) > 1:
            texts[INDEX] = _index(files, table, kinds)
    if fields is None or (dtype is not None and dtype not in _dtypes(fields)):
        beside.pop(CONFIG, None)
        common = max(kinds.values(), key=list(kinds.values()).count)
        if fields is None:
            told = family.config(found.model, common)
        else:
            told = fields | dict.fromkeys(_KEYS & fields.keys() or {"torch_dtype"}, common)
        texts[CONFIG] = as_json(told).encode()
    outputs = tuple(
        Output(
            name,
            sum(table[each].bytes(kinds[each]) for each in names),
            partial(write_tensors, {each: table[each] for each in names}, kinds),
        )
        for name, names in files.items()
    )
    if found.tokenizer is not None and not found.companions:
        written, copied = tokenizer_files(found.tokenizer, found.end)
        return OutputPlan(outputs, written | texts, copied)
    return OutputPlan(outputs, texts, beside)


def model_type(found: Weights) -> str:
    """The family that weights are written as, by its name in `config.json`. Raises InputError if none has the model."""
    config = next((file for file in found.companions if file.name == CONFIG), None)
    return _family(found, config)[0].model_type


def write_tensors(table: Table, kinds: Mapping[str, str], stream: Stream, put: Put) -> None:
    """Write a file of safetensors. kinds: data types of tensors, by their names."""
    start, order = header({name: (kinds[name], theirs.shape) for name, theirs in table.items()})
    stream.write(start)
    for name in order:
        put(stream, table[name], kinds[name])


def _family(found: Weights, config: Path | None) -> tuple[Family, dict[str, Any] | None]:
    """The family to write, and the fields of a config.json that came with the weights, if it means the same model."""
    if config is not None:
        try:
            family, model = read_config(config.parent)
        except InputError:
            return family_of(found.model), None
        if found.model.mtp is None:  # transformers leaves its layers out, and still tells of them
            model = replace(model, mtp=None)
        if not lost(found.model, model):
            fields = read_object(config, MAX_CONFIG_BYTES)
            other = fields.get("quantization_config") or fields["model_type"] in TEXT_PARTS  # the weights are not so
            return family, None if other else fields
        return family_of(found.model, family.model_type), None
    return family_of(found.model, found.family), None


_KEYS = {"torch_dtype", "dtype"}


def _dtypes(fields: Mapping[str, Any]) -> set[Any]:
    return {fields.get(key) for key in _KEYS}


def _as_before(index: Path, table: Table) -> dict[str, list[str]] | None:
    """The files of an index that came with the weights; None where it has other tensors."""
    try:
        places = listed(index.parent)
    except InputError:
        return None
    same = set().union(*places.values()) == set(table) and all(file.endswith(".safetensors") for file in places)
    return {file: sorted(names) for file, names in places.items()} if same else None


def _split(table: Table, kinds: Mapping[str, str], most: int) -> dict[str, list[str]]:
    """The tensors of every file, in transformers' order; a file has at most `most` bytes, or a single tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, theirs in table.items():
        bytes_ = theirs.bytes(kinds[name])
        if bytes_ > most:
            shards.insert(len(shards) - 1, [name])  # as transformers does: the file that is being filled stays open
            continue
        if size + bytes_ > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    shards = [shard for shard in shards if shard]
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _index(files: Mapping[str, list[str]], table: Table, kinds: Mapping[str, str]) -> bytes:
    size = sum(theirs.bytes(kinds[name]) for name, theirs in table.items())
    places = {name: file for file, names in files.items() for name in names}
    parameters = sum(theirs.elements for theirs in table.values())
    told = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": places}
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def companions(path: Path) -> tuple[Path, ...]:
    """The files beside the weights that belong to the model."""
    return tuple(sorted(file for file in path.iterdir() if file.is_file() and COMPANIONS.fullmatch(file.name)))
