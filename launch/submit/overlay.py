"""A user's own fields in a manifest: overlays that are laid over it by strategic merge, as kustomize does.

Mappings are merged, `null` removes a field, and lists take the place of lists; but those of MERGE_KEYS, whose items
Kubernetes knows by a key, are merged item by item: new ones come first. `$patch: replace` in a mapping or an item has
it take the other's place, and as an item of its own that of the whole list; `$patch: delete` removes. `$retainKeys`
names the fields of a mapping that may stay. See
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import UserError

MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "env": "name", "volumes": "name",
    "imagePullSecrets": "name", "resourceClaims": "name", "schedulingGates": "name", "volumeMounts": "mountPath",
    "volumeDevices": "devicePath", "hostAliases": "ip", "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
}  # fmt: skip
PORTS = {"Job": "containerPort", "Service": "port"}  # key of the list `ports`, by the kind of the document
MAX_FILE_BYTES = 1 << 20  # bytes of a file
MAX_DEPTH = 50  # levels of its fields
WAYS = ("merge", "replace", "delete")
Document = dict[str, Any]


def read_overlay(path: Path) -> list[Document]:
    """The documents of a file: JSON, an object or a list of them, or YAML. Raises UserError."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise UserError(f"{path}: must be at most {MAX_FILE_BYTES:,} bytes")
    try:
        text = raw.decode()
        found = json.loads(text)
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text in UTF-8") from None
    except (ValueError, RecursionError):
        found = _yaml(path, text)
    documents = found if isinstance(found, list) else [found]
    for document in documents:
        _plain(document, str(path))
        if not isinstance(document, dict) or document.get("kind") not in PORTS:
            kind = document.get("kind") if isinstance(document, dict) else document
            raise UserError(f"{path}: kind: {kind!s:.60}: must be one of {', '.join(PORTS)}, which the manifest has")
    return documents


def _yaml(path: Path, text: str) -> list[Any]:
    """The documents of a text in YAML, if there is a library that reads it."""
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise UserError(
            f"{path}: is not JSON, and this Python has no PyYAML to read YAML; write it as JSON, or install pyyaml"
        ) from None
    try:

        class ManifestLoader(yaml.SafeLoader):  # type: ignore[name-defined]
            """Takes no aliases: a few of them stand for a document without end."""

            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    raise UserError(f"{path}: has aliases, which could make it endless; write out what they stand for")
                return super().compose_node(parent, index)

        return [document for document in yaml.load_all(text, ManifestLoader) if document is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from None


def _plain(value: Any, where: str, depth: int = 0) -> None:
    """Raises UserError for what JSON does not have, such as the dates of YAML, and for what is nested too deep."""
    if depth > MAX_DEPTH:
        raise UserError(f"{where[:200]}: is nested more than {MAX_DEPTH} levels deep, which no manifest is")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f"{where}: {name!s:.60}: must be a text, in quotes, to name a field")
            _plain(item, f"{where}: {name}", depth + 1)
    elif isinstance(value, list):
        for item in value:
            _plain(item, where, depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise UserError(f"{where}: {value!s:.60}: is taken for a {type(value).__name__}; put it in quotes")


def overlaid(documents: Sequence[Document], overlays: Sequence[Document]) -> list[Document]:
    """The manifest's documents with overlays laid over them, one after another. Raises UserError."""
    found = {document["kind"]: document for document in documents}
    for overlay in overlays:
        kind = overlay["kind"]
        base = found[kind]
        about = {"apiVersion": (base, overlay)}
        if isinstance(more := overlay.get("metadata", {}), dict):
            about |= {f"metadata.{name}": (base["metadata"], more) for name in ("name", "namespace")}
        for path, (ours, theirs) in about.items():
            name = path.rpartition(".")[2]
            if name in theirs and theirs[name] != ours.get(name):
                raise UserError(
                    f"--overlay: {kind}: {path}: {theirs[name]!s:.60}: must be {ours.get(name)}, or be left out; "
                    "--name and --namespace change those of all documents"
                )
        if overlay.get("$patch", "merge") != "merge":
            raise UserError(f"--overlay: {kind}: $patch: {overlay['$patch']!s:.60}: a run needs this document")
        found[kind] = _map(base, overlay, {**MERGE_KEYS, "ports": PORTS[kind]}, kind)
    return list(found.values())


def _merged(old: Any, patch: Any, keys: Mapping[str, str], where: str) -> Any:
    """Value of a field under a patch; None: it is removed."""
    if None not in (old, patch) and {type(old), type(patch)} & {dict, list} and type(old) is not type(patch):
        raise UserError(f"--overlay: {where}: {patch!s:.60}: is a {_sort(patch)}, and must be a {_sort(old)}")
    if isinstance(patch, dict):
        return None if patch.get("$patch") == "delete" else _map(old or {}, patch, keys, where)
    if isinstance(patch, list):
        key = keys.get(where.rpartition(".")[2])
        items = [item for item in patch if item != {"$patch": "replace"}]
        kept = old or [] if len(items) == len(patch) else []
        return items if key is None else _items(kept, items, key, keys, where)
    return patch


def _sort(value: Any) -> str:
    return "mapping" if isinstance(value, dict) else "list" if isinstance(value, list) else "single value"


def _map(old: Document, patch: Document, keys: Mapping[str, str], where: str) -> Document:
    way, retained = patch.get("$patch", "merge"), patch.get("$retainKeys", list(old))
    if way not in WAYS:
        raise UserError(f"--overlay: {where}: $patch: {way!s:.60}: must be one of {', '.join(WAYS)}")
    if not isinstance(retained, list):
        raise UserError(f"--overlay: {where}: $retainKeys: {retained!s:.60}: must be a list of fields")
    result = {} if way == "replace" else {name: value for name, value in old.items() if name in retained}
    for name, value in patch.items():
        if name in ("$patch", "$retainKeys"):
            continue
        if name.startswith("$"):
            raise UserError(f"--overlay: {where}: {name:.60}: is not known; use $patch or $retainKeys")
        new = _merged(result.get(name), value, keys, f"{where}.{name}")
        if new is None:
            result.pop(name, None)
        else:
            result[name] = new
    return result


def _items(
    old: Sequence[Document], patch: Sequence[Any], key: str, keys: Mapping[str, str], where: str
) -> list[Document]:
    """A list whose items are known by `key`."""
    new, result = [], list(old)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise UserError(
                f"--overlay: {where}: {item!s:.60}: must have {key}, by which items of this list are merged"
            )
        name = f"{where}[{item[key]!s:.60}]"
        at = next((at for at, each in enumerate(result) if each.get(key) == item[key]), None)
        found = _merged({} if at is None else result[at], item, keys, name)
        if at is None:
            new += [found] if found is not None else []
        else:
            result[at : at + 1] = [found] if found is not None else []
    return new + result
