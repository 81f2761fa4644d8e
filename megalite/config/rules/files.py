"""Checks that the files and packages that training needs are there."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from megalite.base.errors import InputError, Problem, listing
from megalite.base.files import UnreachableError, exists, is_file, look, read_object
from megalite.config.parallel_schema import SCHEDULES
from megalite.config.remote import SCHEMES, scheme_of
from megalite.config.schema import Config, Source
from megalite.config.sources import split_kind

MAX_DESCRIPTION_BYTES = 4 << 20  # bytes of a store's .json


def validate_files(config: Config) -> list[Problem]:
    """All files and packages that training needs and that are missing. Relative paths start at the working folder."""
    data, resume = config.data, config.checkpoint.resume
    problems = [*_stores("data.train", data.train), *_stores("data.valid", data.valid)]
    if not data.train:
        problems.append(Problem("data.train", "is empty", "list token stores, as in data.train=[{path: data/train}]"))
    if config.eval.steps > 0 and not data.valid:
        problems.append(
            Problem("eval.steps", "evaluation needs data.valid", "list token stores there, or use 0", config.eval.steps)
        )
    if data.tokenizer is not None:
        problems += _missing("data.tokenizer", data.tokenizer, is_file, "no such file", "correct the path, or use null")
    schedule, weights = config.parallel.pipeline.schedule, config.checkpoint.weights
    if schedule not in SCHEDULES:
        problems += _missing("parallel.pipeline.schedule", schedule, is_file, "no such file", "correct the path")
    if resume not in ("auto", "never"):
        fix = "use auto, never or the path of a checkpoint"
        problems += _missing("checkpoint.resume", resume, exists, "no such checkpoint", fix)
    if weights is not None:
        fix = "correct the path, or use null"
        path = str(split_kind(weights)[1])
        problems += _missing("checkpoint.weights", path, exists, "no such checkpoint", fix)
    log = config.log
    trackers = (
        ("wandb", "wandb", log.wandb),
        ("mlflow", "mlflow", log.mlflow),
        ("prometheus", "prometheus_client", log.prometheus),
    )
    for name, package, value in trackers:
        if value is not None and not _installed(package):
            rule = f"needs the package {package}, which is not installed"
            problems.append(Problem(f"log.{name}", rule, f"pip install 'megalite[{name}]', or use null", value))
    return problems


def _installed(package: str) -> bool:
    """Return whether a package is installed. A mere folder of its name, which Python would import, does not count."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _missing(key: str, path: str, there: Callable[[str], bool], rule: str, fix: str) -> Iterator[Problem]:
    """Yield the problem with the path in a key, unless the file that it names is there."""
    try:
        if not there(path):
            yield Problem(key, rule, fix, path)
    except UnreachableError as error:
        yield Problem(key, error.rule, error.fix, path)


def _stores(key: str, sources: list[Source]) -> Iterator[Problem]:
    for i, source in enumerate(sources):
        scheme = scheme_of(source.path)
        if scheme is not None:  # its objects are looked at when it is opened
            package, needed = SCHEMES[scheme]
            if not _installed(package):
                rule, fix = f"needs the package {package}, which is not installed", f"pip install 'megalite[{needed}]'"
                yield Problem(f"{key}[{i}].path", rule, f"{fix}, or copy the store to a disk", source.path)
            continue
        if "://" in source.path:
            rule = f"is no URL that can be read, which begins with {', '.join(SCHEMES)}"
            fix = "copy the store to a server with one of these, or to a disk"
            yield Problem(f"{key}[{i}].path", rule, fix, source.path)
            continue
        try:
            missing = [source.path + end for end in (".bin", ".idx") if not is_file(source.path + end)]
            if len(missing) == 2 and is_file(f"{source.path}.shards"):
                continue  # its stores are looked at when it is opened
            wrong = None if missing else _wrong_mask(source.path)
        except UnreachableError as error:
            yield Problem(f"{key}[{i}].path", error.rule, error.fix, source.path)
            continue
        if missing:
            name, suffix = os.path.splitext(source.path)
            fix = (
                f"leave out the {suffix}"
                if name and suffix in (".bin", ".idx", ".shards")
                else "correct the path, or make it with megalite-prepare-data"
            )
            yield Problem(f"{key}[{i}].path", f"no such file: {listing(missing, 'and')}", fix, source.path)
        if wrong is not None:
            yield Problem(
                f"{key}[{i}].path", wrong, "copy all files of the store again, or prepare it anew", source.path
            )


def _wrong_mask(prefix: str) -> str | None:
    """The reason why a store's mask cannot be its own, by what its description says; None: there is none."""
    mask = look(f"{prefix}.mask", follow=False)
    try:
        described = read_object(Path(f"{prefix}.json"), MAX_DESCRIPTION_BYTES)
    except InputError:  # the checks of the data tell that better, if there is a description at all
        described = {}
    if mask is None:
        return f"{prefix}.mask, which {prefix}.json speaks of, is not there" if "trained_tokens" in described else None
    if not is_file(f"{prefix}.mask"):
        return f"{prefix}.mask is no regular file, nor a link to one"
    tokens, size = described.get("tokens"), os.stat(f"{prefix}.mask").st_size
    if isinstance(tokens, int) and size != -(-tokens // 8):
        return f"{prefix}.mask has {size:,} bytes, not the {-(-tokens // 8):,} of {tokens:,} tokens"
    return None
