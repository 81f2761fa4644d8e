"""Which files and packages training needs."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megalite.config.errors import Problem, listing
from megalite.config.schema import SCHEDULES, Config, Source


def validate_files(config: Config) -> list[Problem]:
    """Every file and package that training needs and does not find; relative paths start at the working directory."""
    data, resume = config.data, config.checkpoint.resume
    problems = [*_stores("data.train", data.train), *_stores("data.valid", data.valid)]
    if not data.train:
        problems.append(Problem("data.train", "is empty", "list token stores, as in data.train=[{path: data/train}]"))
    if config.eval.steps > 0 and not data.valid:
        problems.append(
            Problem("eval.steps", "evaluation needs data.valid", "list token stores there, or use 0", config.eval.steps)
        )
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        problems.append(Problem("data.tokenizer", "no such file", "correct the path, or use null", data.tokenizer))
    schedule = config.parallel.pipeline.schedule
    if schedule not in SCHEDULES and not Path(schedule).is_file():
        problems.append(Problem("parallel.pipeline.schedule", "no such file", "correct the path", schedule))
    if resume not in ("auto", "never") and not Path(resume).exists():
        problems.append(
            Problem("checkpoint.resume", "no such checkpoint", "use auto, never or the path of a checkpoint", resume)
        )
    weights = config.checkpoint.weights
    if weights is not None and not Path(weights).exists():
        problems.append(Problem("checkpoint.weights", "no such checkpoint", "correct the path, or use null", weights))
    if config.log.wandb is not None and not _installed("wandb"):
        rule = "needs the package wandb, which is not installed"
        problems.append(Problem("log.wandb", rule, "pip install 'megalite[wandb]', or use null", config.log.wandb))
    return problems


def _installed(package: str) -> bool:
    """Whether there is a package, and not merely a folder of its name, which Python takes for a package as well."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _stores(key: str, sources: list[Source]) -> Iterator[Problem]:
    for i, source in enumerate(sources):
        missing = [source.path + end for end in (".bin", ".idx") if not Path(source.path + end).is_file()]
        if missing:
            extra = source.path.endswith((".bin", ".idx"))
            fix = (
                f"leave out the {source.path[-4:]}"
                if extra
                else "correct the path, or make it with megalite-prepare-data"
            )
            yield Problem(f"{key}[{i}].path", f"no such file: {listing(missing, 'and')}", fix, source.path)
