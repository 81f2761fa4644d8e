"""Reads YAML files with `include:`, merges and overrides them, and makes a typed configuration of them."""

import re
from collections.abc import Iterable, Mapping
from os.path import lexists, realpath
from pathlib import Path
from typing import Any, cast

from megalite.base.errors import InputError, Problem
from megalite.base.late_import import import_for_good
from megalite.config.convert import from_plain, keys, kind, sections, to_plain
from megalite.config.model_schema import Model
from megalite.config.presets import CONFIGS, ENDINGS, preset_or_file, presets
from megalite.config.references import KEY, fill_in
from megalite.config.schema import Config, Kernels
from megalite.config.yaml import MAX_DEPTH, parse, read_mapping

Read = dict[str, dict[str, Any]]  # files that have been read, with what they include, by their real paths


def load(paths: Iterable[str], overrides: Iterable[str] = (), model: Model | None = None) -> Config:
    """The configuration in the YAML files `paths`, changed by `key=value` overrides.

    model: what the files start from, in place of the default model.

    A path may be the name of a preset instead, such as `llama3_8b`, if there is no such file.
    A file may start from others with a top-level `include:`, a path or a list of paths relative to itself.
    Later values win: a file's over those of its includes, a later file's over an earlier one's, an override's over all.
    A section left empty changes nothing. Values may refer to each other as `${model.width}`.

    Raises `InputError` for a file that cannot be read, and with all unknown keys, values of a wrong type
    and malformed overrides at once. Rules between values are checked by `validate`.
    """
    plain = merged(paths, model)
    malformed: list[Problem] = []
    for override in overrides:
        try:
            plain = _overridden(plain, override)
        except InputError as error:
            malformed += error.problems
    config, problems = typed(plain)
    if malformed or problems:
        raise InputError([*malformed, *problems])
    return config


def merged(paths: Iterable[str], model: Model | None = None) -> dict[str, Any]:
    """The content of the YAML files `paths` laid on the defaults; references are not filled in yet."""
    plain, known = to_plain(Config(model=model or Model())), Read()  # the defaults too can be referred to
    for path in paths:
        if not path:
            raise InputError("the name of a configuration file is empty; is a variable of the shell unset?")
        plain = _merge(plain, _read(located(path), (), known))
    return plain


def is_set(paths: Iterable[str], key: str) -> bool:
    """Return whether one of the YAML files `paths`, or one that they include, gives the dotted `key` a value."""
    for path in paths:
        found: Any = _read(located(path), (), {})
        for step in key.split("."):
            found = found.get(step) if isinstance(found, dict) else None
        if found is not None:
            return True
    return False


def located(given: str, folder: Path = Path(), includers: tuple[Path, ...] = ()) -> Path:
    """The configuration file at a path, seen from `folder`, or the preset of that name. Raises InputError."""
    try:
        return preset_or_file(given, CONFIGS, folder)
    except InputError as error:
        raise InputError(f"{error}{_advice(folder / given, includers)}") from error


def with_values(plain: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` with a value at each dotted key, as overrides set them. Raises InputError for a key that cannot."""
    for key, value in values.items():
        plain = _set(plain, re.findall(r"\w+", key), value, key)
    return plain


def typed(plain: dict[str, Any]) -> tuple[Config, list[Problem]]:
    """The configuration that `plain` describes once its references are filled in, and all that is wrong with it."""
    filled, unresolved = fill_in(plain)
    config, problems = from_plain(filled)
    return config, [*unresolved, *problems]


def dump_model(model: Model) -> str:
    """YAML of the section `model` that `load` reads back as an equal one."""
    return _written({"model": to_plain(Config(model=model))["model"]})


def dump(config: Config) -> str:
    """YAML that `load` reads back as an equal configuration."""
    return _written(escaped(to_plain(config)))


def _written(content: dict[str, Any]) -> str:
    """YAML by OmegaConf. It is imported here, since a third of the start of other commands would be its import."""
    omegaconf = import_for_good("omegaconf").OmegaConf
    text: str = omegaconf.to_yaml(omegaconf.create(content))
    return text


def files_and_overrides(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command line as `load` takes them: paths of files and `key=value` overrides, each in order."""
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if is_override(argument) else files).append(argument)
    return files, overrides


def is_override(argument: str) -> bool:
    """Return whether a command-line argument is a `key=value` override, not a file."""
    return re.fullmatch(KEY, argument.partition("=")[0]) is not None and "=" in argument


def _read(path: Path, includers: tuple[Path, ...], known: Read) -> dict[str, Any]:
    """The content of one file merged over its includes. `includers` are the files that led here, outermost first."""
    chain, real = (*includers, path), realpath(path)
    if real in map(realpath, includers):
        raise InputError(f"{' includes '.join(map(str, chain))}: files must not include each other in a circle")
    if len(chain) > MAX_DEPTH:
        raise InputError(f"{path}: is included through {len(includers)} files; at most {MAX_DEPTH} are allowed")
    if real in known:
        return known[real]
    try:
        content = read_mapping(path, quoting=not includers)  # lines of another file are nobody's business
    except InputError as error:
        raise InputError(f"{error}{_advice(path, includers)}") from error
    included = content.pop("include", None)
    if includers and content and not any(name in keys() for name in content):
        rule = (
            f"is no configuration: it has none of the sections {', '.join(name for name in keys() if '.' not in name)}"
        )
        raise InputError(f"{path}: {rule}{_advice(path, includers)}")
    listed = included if isinstance(included, list) else [] if included is None else [included]
    if not all(isinstance(item, str) and item for item in listed):
        raise InputError(f"{path}: include = {included!r:.200}: must be a path or a list of paths")
    plain: dict[str, Any] = {}
    for item in listed:
        plain = _merge(plain, _read(located(item, path.parent, chain), chain, known))
    known[real] = _merge(plain, content)
    return known[real]


def _advice(path: Path, includers: tuple[Path, ...]) -> str:
    """Further advice about a file that is not there, or that is no YAML."""
    if includers:
        return f" (included by {includers[-1]})"
    key = re.split(r"[=:]", str(path), maxsplit=1)[0].strip()
    if path.suffix in ENDINGS and path.stem in presets(*CONFIGS) and not lexists(path):
        return f"; megalite comes with one that is called {path.stem}, without a folder and without {path.suffix}"
    if lexists(path) or not (key in keys() or "=" in path.name):
        return ""
    if key in keys():
        return f"; an override is written {key}=VALUE, without spaces"
    return "; an override is written key=value, its key as in model.layers or data.train[0].path, without spaces"


def _merge(base: dict[Any, Any], over: dict[Any, Any], prefix: str = "") -> dict[Any, Any]:
    """`over` laid on `base`, section by section; everything but sections is replaced whole, lists too."""
    merged = dict(base)
    for name, value in over.items():
        key = f"{prefix}{name}"
        old = _spelled_out(base.get(name)) if key == "kernels" else base.get(name)
        if value is None and key in sections():
            continue
        merged[name] = _merge(old, value, f"{key}.") if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _spelled_out(kernels: Any) -> Any:
    """The section that a word for all kernels stands for, so that single ones can be changed."""
    return vars(Kernels.all(kernels)) if isinstance(kernels, str) else kernels


def _overridden(plain: dict[str, Any], override: str) -> dict[str, Any]:
    """`plain` with one override applied. Raises InputError with the problem if it cannot be applied."""
    key, _, text = override.partition("=")
    steps = re.findall(r"\w+", key)
    if not is_override(override) or len(steps) > MAX_DEPTH:
        raise InputError([Problem(override, "is not an override", "write key=value, such as model.layers=8")])
    try:
        value = parse(text)
    except ValueError as error:
        raise InputError([Problem(key, "cannot be overridden", str(error), text)]) from error
    if value is None and key in sections():
        raise InputError([Problem(key, f"must be {kind(keys()[key])}", value=None)])
    return _set(plain, steps, value, key)


def _set(plain: dict[str, Any], steps: list[str], value: Any, key: str) -> dict[str, Any]:
    """`plain` with `value` at the end of the path `steps`, merged over what is there."""
    path, at = [], plain
    for number, step in enumerate(steps):
        inner: Any = at.get(step)
        path.append(step)
        if isinstance(inner, list) and number + 1 < len(steps):
            return _merge(plain, _nested(path, _with_item(inner, steps[number + 1 :], value, key)))
        at = inner if isinstance(inner, dict) else {}
    return _merge(plain, _nested(steps, value))


def _with_item(items: list[Any], steps: list[str], value: Any, key: str) -> list[Any]:
    number, *inside = steps
    if not number.isdecimal():
        raise InputError(
            [Problem(key, "does not say which item of the list", "give its number, as in data.train[0].path", value)]
        )
    if len(number) > 9 or int(number) >= len(items):
        raise InputError([Problem(key, f"names item {number:.20} of a list of {len(items)}", "count from 0", value)])
    old = items[int(number)]
    new = _set(old if isinstance(old, dict) else {}, inside, value, key) if inside else value
    return [*items[: int(number)], new, *items[int(number) + 1 :]]


def _nested(steps: list[str], value: Any) -> dict[str, Any]:
    for step in reversed(steps):
        value = {step: value}
    return cast(dict[str, Any], value)


def escaped(value: Any) -> Any:
    """The container with every `${` protected from being read as a reference."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
