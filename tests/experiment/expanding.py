"""Experiments in a folder of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from faked import BASE

from megalite.experiment.expand import Expanded, expand
from megalite.experiment.read import read_experiment

Expander = Callable[..., Expanded]


@pytest.fixture
def expanded(tmp_path: Path) -> Expander:
    """Expands an experiment that is given as its sections; base: changes of the base's sections."""

    def make(base: dict[str, Any] | None = None, **sections: Any) -> Expanded:
        plain = {key: dict(value) for key, value in BASE.items()}
        for section, values in (base or {}).items():
            plain[section] = {**plain.get(section, {}), **values}
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(plain))
        about = {"name": "exp", "base": "base.yaml", "dir": str(tmp_path), **sections.pop("experiment", {})}
        (tmp_path / "exp.yaml").write_text(yaml.safe_dump({"experiment": about, **sections}, sort_keys=False))
        return expand(read_experiment(tmp_path / "exp.yaml"))

    return make
