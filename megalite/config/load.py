"""YAML files with `include:`, merged and overridden, as a typed configuration."""

import re
from collections.abc import Iterable
from dataclasses import fields
from os.path import realpath
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.convert import from_plain, sections, to_plain
from megalite.config.errors import InputError, Problem
from megalite.config.schema import Config, Kernels

KEY = r"[A-Za-z_]\w*(\.\w+|\[\d+\])*"  # model.layers, data.train[0].path
NULL = "tag:yaml.org,2002:null"


def load(paths: Iterable[str], overrides: Iterable[str] = ()) -> Config:
    """The configuration in the YAML files `paths`, changed by `key=value` overrides.

    A file may start from others with a top-level `include:`, a path or a list of paths relative to itself.
    What comes later wins: a file over its includes, a later file over an earlier one, an override over all.
    A section left empty changes nothing. Values may refer to each other as `${model.width}`.

    Raises `InputError` for a file that cannot be read, and with all unknown keys, values of a wrong type
    and malformed overrides at once. Rules between values are checked by `validate`.
    """
    plain = to_plain(Config())  # the defaults too can be referred to
    for path in paths:
        plain = _merge(plain, _read(Path(path), ()))
    merged = OmegaConf.create(plain)
    malformed = [problem for override in overrides if (problem := _override(merged, override))]
    config, problems = from_plain(_resolve(merged))
    if malformed or problems:
        raise InputError([*malformed, *problems])
    return config


def dump(config: Config) -> str:
    """YAML that `load` reads back as an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(to_plain(config))))


def is_override(argument: str) -> bool:
    """Whether a command-line argument is a `key=value` override, not a file."""
    return re.fullmatch(KEY, argument.partition("=")[0]) is not None and "=" in argument


def _read(path: Path, includers: tuple[Path, ...]) -> dict[Any, Any]:
    """The content of one file merged over its includes; `includers` led here, outermost first."""
    chain = (*includers, path)
    if realpath(path) in map(realpath, includers):
        raise InputError(f"{' includes '.join(map(str, chain))}: files must not include each other in a circle")
    content = _parse(path, includers)
    included = content.pop("include", None)
    listed = included if isinstance(included, list) else [] if included is None else [included]
    if not all(isinstance(item, str) and "\0" not in item for item in listed):
        raise InputError(f"{path}: include = {included!r}: must be a path or a list of paths")
    plain: dict[Any, Any] = {}
    for item in listed:
        plain = _merge(plain, _read(path.parent / item, chain))
    return _merge(plain, content)


def _parse(path: Path, includers: tuple[Path, ...]) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text") from error
    except OSError as error:
        origin = f", included by {includers[-1]}" if includers else ""
        hint = "; an override is written key=value" if "=" in path.name else ""
        raise InputError(f"{path}: cannot be read{origin}: {error.strerror}{hint}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not (root is None or isinstance(root, yaml.MappingNode) or root.tag == NULL):
            raise InputError(f"{path}: must be a mapping, `key: value` lines, at its top level")
        return _plain(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"{path}: is not valid YAML: {_reason(error)}") from error


def _merge(base: dict[Any, Any], over: dict[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """`over` laid on `base`, section by section; everything else, lists too, is replaced whole."""
    merged = dict(base)
    for name, value in over.items():
        key = f"{prefix}{name}"
        old = _spelled_out(base.get(name)) if key == "kernels" else base.get(name)
        if value is None and key in sections():
            continue
        merged[name] = _merge(old, value, f"{key}.") if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _spelled_out(kernels: Any) -> Any:
    """A word for all kernels as a section, of which one can be changed."""
    return {field.name: kernels for field in fields(Kernels)} if isinstance(kernels, str) else kernels


def _override(merged: DictConfig, override: str) -> Problem | None:
    """Applies one override to `merged`; the problem, where it cannot be."""
    key, _, value = override.partition("=")
    if not is_override(override):
        return Problem(override, "is not an override", "write key=value, such as model.layers=8")
    try:
        if key.partition(".")[0] == "kernels":
            merged.kernels = _spelled_out(merged.kernels)
        merged.merge_with_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return Problem(key, "cannot be overridden", _reason(error), value)
    except ValueError:
        return Problem(key, "names an item of a list", "write its number, as in data.train[0].path", value)
    return None


def _resolve(merged: DictConfig) -> dict[Any, Any]:
    try:
        return _plain(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(
            [Problem(error.full_key or "the configuration", "cannot be resolved", _reason(error))]
        ) from error


def _plain(config: Any, resolve: bool) -> dict[Any, Any]:
    return cast(dict[Any, Any], OmegaConf.to_container(config, resolve=resolve))


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return str(error).partition("\n")[0]


def _escape(value: Any) -> Any:
    """The container with every `${` protected from being read as a reference."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
