"""Folders of Hugging Face transformers. Imports no torch."""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megalite.checkpoint.disk import damage_of
from megalite.checkpoint.formats.opened import PREFIX, Weights, refuse_differences
from megalite.checkpoint.formats.output import Output, Plan, Put, Stream
from megalite.checkpoint.formats.safetensors import INDEX, ONE_FILE, find, header, listed
from megalite.checkpoint.formats.tokenizer import ends_in, tokenizer_files
from megalite.checkpoint.index import ITEM_BYTES, Index
from megalite.checkpoint.maps.families import CONFIG, LARGEST, family_of, plain_model, read_config
from megalite.checkpoint.maps.family import Family
from megalite.checkpoint.maps.strips import Table, under_our_names
from megalite.config.errors import InputError
from megalite.config.files import as_json, read_object
from megalite.plan.weights import weights

SHARD = 5_000_000_000  # bytes of a file, as the hub advises
WITHOUT_MEANING = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq)")  # older files have these
COMPANIONS = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\..*|README\.md|LICENSE.*|NOTICE.*|USE_POLICY.*|model\.safetensors\.index\.json"
)


def open_folder(path: Path) -> Weights:
    """The weights in a folder. Raises InputError for a model that megalite lacks, DamagedError for damaged files."""
    family, model = read_config(path)
    files = find(path)
    table = family.table(model)
    tied_copy = {"lm_head.weight"} if model.tie_embeddings else set()
    found = {
        name: stored
        for name, stored in files.index.tensors.items()
        if name in table or (name not in tied_copy and not WITHOUT_MEANING.fullmatch(name))
    }
    refuse_differences(path, files.source, found.keys(), table)
    with damage_of(path, files.source):
        index = under_our_names(Index(files.index.files, found), table, weights(model), PREFIX)
    return Weights(
        "hf",
        path,
        model,
        index,
        files.sizes,
        files.source,
        family=family.model_type,
        companions=companions(path),
        ends=ends_in(path),
    )


def plan(found: Weights, dtype: str | None, shard: int | None) -> Plan:
    """A folder as transformers writes it.

    dtype: of all tensors; None: each keeps its own. shard: bytes of a file at most, unless one tensor has more; None:
    as in the folder that the weights once came from, or SHARD. Raises InputError if no family has such a model.
    """
    beside = {file.name: file for file in found.companions}
    family, fields = _family(found, beside.get(CONFIG))
    table = family.table(found.model)
    kinds = {name: dtype or found.index.tensors[PREFIX + theirs.strips[0].name].dtype for name, theirs in table.items()}
    texts: dict[str, bytes] = {}
    files = None if shard is not None or INDEX not in beside else _as_before(beside[INDEX], table)
    if files is None:
        beside.pop(INDEX, None)
        files = _split(table, kinds, shard or SHARD)
        if len(files) > 1:
            texts[INDEX] = _index(files, table, kinds)
    if fields is None or (dtype is not None and dtype not in _dtypes(fields)):
        beside.pop(CONFIG, None)
        common = max(kinds.values(), key=list(kinds.values()).count)
        told = (
            family.config(found.model, common)
            if fields is None
            else fields | dict.fromkeys(_KEYS & fields.keys(), common)
        )
        texts[CONFIG] = as_json(told).encode()
    outputs = tuple(
        Output(name, sum(table[each].elements for each in names), partial(_write, {n: table[n] for n in names}, kinds))
        for name, names in files.items()
    )
    if found.tokenizer is not None and not found.companions:
        written, copied = tokenizer_files(found.tokenizer, found.end)
        return Plan(outputs, written | texts, copied)
    return Plan(outputs, texts, beside)


def _write(table: Table, kinds: Mapping[str, str], stream: Stream, put: Put) -> None:
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
        if plain_model(model) == plain_model(found.model):
            return family, read_object(config, LARGEST)
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
    return (
        {file: sorted(names) for file, names in places.items()} if set().union(*places.values()) == set(table) else None
    )


def _split(table: Table, kinds: Mapping[str, str], most: int) -> dict[str, list[str]]:
    """The tensors of every file, in transformers' order; a file has at most `most` bytes, or a single tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, theirs in table.items():
        bytes_ = theirs.elements * ITEM_BYTES[kinds[name]]
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
    size = sum(theirs.elements * ITEM_BYTES[kinds[name]] for name, theirs in table.items())
    places = {name: file for file, names in files.items() for name in names}
    parameters = sum(theirs.elements for theirs in table.values())
    told = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": places}
    return (json.dumps(told, indent=2, sort_keys=True) + "\n").encode()


def companions(path: Path) -> tuple[Path, ...]:
    """The files beside the weights that belong to the model."""
    return tuple(sorted(file for file in path.iterdir() if file.is_file() and COMPANIONS.fullmatch(file.name)))
