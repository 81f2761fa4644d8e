"""Settings of an experiment's fits: the sections `fit`, `holdout` and `parameters` of `experiment.yaml`."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from megalite.config.convert import typed_section
from megalite.config.yaml import read_mapping
from megalite.experiment.fitting import fit_rules
from megalite.experiment.read import ExperimentError
from megalite.experiment.schema import About, Fit, Holdout, Sizes

DEFINITIONS = ("with_head", "total", "non_embedding")  # ways to count N: with the output layer alone, all, layers alone


@dataclass
class Sections:
    """Sections of an experiment's file that are read here; commands that expand it read and check all of it."""

    experiment: About = field(default_factory=About)
    parameters: Sizes = field(default_factory=Sizes)
    holdout: Holdout = field(default_factory=Holdout)
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True)
class Settings:
    """Settings of fits. method: whose predictions count. delta: where Huber's loss becomes linear, in ln(loss).

    min_steps: runs with fewer are left out. drop: that many runs with the highest losses, or runs by id or slug.
    bootstrap: samples. holdout: rungs that no fit sees. parameters: the definition of N that counts. report: all
    definitions, that one first.
    """

    kind: str = ""
    name: str = ""
    method: str = "approach3"
    delta: float = 1e-3
    min_steps: int = 0
    drop: int | tuple[str, ...] = 0
    bootstrap: int = 1000
    holdout: tuple[str, ...] = ()
    parameters: str = "with_head"
    report: tuple[str, ...] = field(default=DEFINITIONS)


def read_settings(folder: Path) -> Settings:
    """Read the fit's settings of the experiment in `folder`.

    Raises InputError that names the file, the keys, their values and the rules.
    """
    path = folder / "experiment.yaml"
    content = read_mapping(path)
    names = [each.name for each in fields(Sections)]
    found, problems = typed_section({name: content[name] for name in names if name in content}, Sections)
    if not problems:
        problems = list(fit_rules(found.fit, found.parameters))
    if problems:
        raise ExperimentError(path, problems)
    fit, sizes = found.fit, found.parameters
    return Settings(
        found.experiment.kind,
        found.experiment.name,
        fit.method,
        fit.delta,
        fit.min_steps,
        fit.drop if isinstance(fit.drop, int) else tuple(fit.drop),
        fit.bootstrap,
        tuple(found.holdout.rungs),
        sizes.fit,
        tuple(dict.fromkeys([sizes.fit, *sizes.report])),
    )
