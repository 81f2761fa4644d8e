"""Converts between plain containers, as YAML gives them, and the dataclasses of the schema."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from keyword import iskeyword
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megalite.base.errors import Problem, listing
from megalite.config.schema import Config

UNRESOLVED_VALUE = object()  # in place of a value whose references cannot be filled in
RENAMED_KEYS = {"optim.offload": "it is optim.placement now: host in place of true, device in place of false"}
MAX_HINTS = 50  # unknown keys that near names are looked for
KINDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    dict: "a section",
    NoneType: "null",
}
T = TypeVar("T")


def from_plain(plain: dict[Any, Any]) -> tuple[Config, list[Problem]]:
    """The configuration that nested dictionaries and lists describe; keys left out keep their defaults.

    Returned with it are all unknown keys and all values of a wrong type. If there are any, the configuration is not fit
    for use.
    """
    return typed_section(plain, Config)


def typed_section(plain: Any, cls: type[T]) -> tuple[T, list[Problem]]:
    """Convert as `from_plain` does, to another class of settings than `Config`."""
    problems: list[Problem] = []
    return _section(plain, cls, "", problems, cls), problems


def to_plain(config: Config) -> dict[str, Any]:
    """Nested dictionaries and lists under the names that YAML has; `from_plain` is the inverse."""
    return asdict(config, dict_factory=lambda pairs: {yaml_name(name): value for name, value in pairs})


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted key, value)` for every scalar in nested dictionaries and lists."""
    if not isinstance(value, dict | list):
        yield key, value
    for name, inner in inside(value, key):
        yield from leaves(inner, name)


def inside(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted key, item)` of the dictionary or list at `key`; nothing for a value of another type."""
    if isinstance(value, dict):
        yield from ((f"{key}.{name}" if key else name, inner) for name, inner in value.items())
    if isinstance(value, list):
        yield from ((f"{key}[{index}]", inner) for index, inner in enumerate(value))


def yaml_name(field_name: str) -> str:
    """The YAML key of a dataclass field: `global_` is spelled `global`."""
    bare = field_name.removesuffix("_")
    return bare if iskeyword(bare) else field_name


@cache
def keys(root: Any = Config) -> MappingProxyType[str, Any]:
    """The type hint of every dotted key, sections included; an item of a list has a key such as `data.train[].path`."""
    return MappingProxyType(dict(_keys(root, "")))


@cache
def sections() -> frozenset[str]:
    """Keys that hold other keys and cannot be null."""
    return frozenset(key for key, hint in keys().items() if is_dataclass(hint))


def _keys(cls: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        key = prefix + yaml_name(field.name)
        yield key, hints[field.name]
        for option in options(hints[field.name]):
            is_list = get_origin(option) is list
            inner = get_args(option)[0] if is_list else option
            if is_dataclass(inner):
                yield from _keys(inner, key + ("[]." if is_list else "."))


@cache
def _fields(cls: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of a section's fields by their keys, and their type hints by their names."""
    return {yaml_name(field.name): field.name for field in fields(cls)}, get_type_hints(cls)


def _section(value: Any, cls: Any, key: str, problems: list[Problem], root: Any) -> Any:
    names, hints = _fields(cls)
    if not isinstance(value, dict):
        problems.append(Problem(key, f"must be {kind(cls)}", value=value))
        return value
    prefix = f"{key}." if key else ""
    problems += [
        Problem(
            f"{prefix}{name}", "unknown key", hint(f"{prefix}{name}", root) if len(problems) + at < MAX_HINTS else ""
        )
        for at, name in enumerate(name for name in value if name not in names)
    ]
    return cls(
        **{
            field: _value(value[name], hints[field], prefix + name, problems, root)
            for name, field in names.items()
            if name in value
        }
    )


def _value(value: Any, hint: Any, key: str, problems: list[Problem], root: Any) -> Any:
    allowed = options(hint)
    if (value is None and NoneType in allowed) or value is UNRESOLVED_VALUE:
        return value
    if value == "???":
        problems.append(Problem(key, "has no value yet", f"set it in a file or with {key}=VALUE"))
        return value
    for option in allowed:
        if is_dataclass(option) and (isinstance(value, dict) or len(allowed) == 1):
            return _section(value, option, key, problems, root)
        if get_origin(option) is list and isinstance(value, list):
            (inner,) = get_args(option)
            return [_value(item, inner, f"{key}[{i}]", problems, root) for i, item in enumerate(value)]
        if get_origin(option) is dict and isinstance(value, dict):
            return value
        if _fits(value, option):
            return float(value) if option is float else value
    remedy = "put it in quotes" if str in allowed and isinstance(value, int | float) else ""
    problems.append(Problem(key, f"must be {listing([kind(option) for option in allowed])}", remedy, value))
    return value


def options(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, option: Any) -> bool:
    if get_origin(option) is Literal:
        return value in get_args(option)
    if isinstance(value, bool):  # Python counts a bool as an int; a configuration must not
        return option is bool
    if option is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(option, type) and isinstance(value, option)


def kind(option: Any) -> str:
    """The name of a type in messages."""
    if is_dataclass(option):
        return f"a section with keys from {listing([yaml_name(field.name) for field in fields(option)])}"
    if get_origin(option) is Literal:
        return listing(get_args(option))
    if get_origin(option) in (Union, UnionType):
        return " or ".join(map(kind, get_args(option)))
    if get_origin(option) is list:
        (inner,) = get_args(option)
        return f"a list, each item {'a section' if is_dataclass(inner) else kind(inner)}"
    return KINDS[get_origin(option) or option]


def hint(key: str, root: Any = Config) -> str:
    """Advice for an unknown key: its new name, the same name elsewhere, or the nearest, of its section if possible."""
    if key in RENAMED_KEYS and root is Config:
        return RENAMED_KEYS[key]
    section, _, leaf = key.rpartition(".")
    within = re.sub(r"\[\d+\]", "[]", section)
    if f"{within}.{leaf}" in keys(root):  # spelled with dots inside of a file
        return "only overrides are written with dots; a file has sections, such as model: {layers: 8}"
    known = [name.rpartition(".") for name in keys(root)]
    siblings = [name for parent, _, name in known if parent == within]
    elsewhere = {name: f"{parent}.{name}" for parent, _, name in reversed(known) if parent}
    if leaf not in elsewhere and (near := get_close_matches(leaf, siblings, 1)):
        return f"did you mean {f'{section}.{near[0]}'.lstrip('.')}?"
    if near := get_close_matches(leaf, elsewhere, 1, 0.8):
        return f"did you mean {elsewhere[near[0]]}?"
    return f"{section or 'the top level'} has {listing(siblings, 'and')}"
