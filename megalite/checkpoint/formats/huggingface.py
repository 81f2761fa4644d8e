"""Folders of Hugging Face transformers. Imports no torch."""

import re
from collections.abc import Collection
from pathlib import Path

from megalite.checkpoint.disk import DamagedError, damage_of
from megalite.checkpoint.formats.opened import PREFIX, Weights
from megalite.checkpoint.formats.safetensors import find
from megalite.checkpoint.index import Index
from megalite.checkpoint.maps.families import CONFIG, read_config
from megalite.checkpoint.maps.strips import Table, under_our_names
from megalite.config.errors import listing
from megalite.plan.weights import weights

SHOWN = 5  # names in a message
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
    refuse_differences(path, files.source, found.keys(), table, family.model_type)
    with damage_of(path, files.source):
        index = under_our_names(Index(files.index.files, found), table, weights(model), PREFIX)
    return Weights("hf", path, model, index, files.sizes, files.source, True, family.model_type, companions(path))


def companions(path: Path) -> tuple[Path, ...]:
    """The files beside the weights that belong to the model."""
    return tuple(sorted(file for file in path.iterdir() if file.is_file() and COMPANIONS.fullmatch(file.name)))


def refuse_differences(path: Path, source: str, found: Collection[str], table: Table, kind: str) -> None:
    """Raises DamagedError where tensors are missing, or are there that the model does not have."""
    for names, what in ((table.keys() - found, "lacks"), (found - table.keys(), "has tensors that no such model has:")):
        if names:
            shown = sorted(names)
            more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
            told = f"{source} {what} {listing(shown[:SHOWN], ',') if more else listing(shown, 'and')}{more}"
            raise DamagedError(path, f"{told}; {CONFIG} says {kind}")
