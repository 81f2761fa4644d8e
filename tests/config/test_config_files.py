import re
from pathlib import Path

import pytest

from megalite.config.convert import keys, sections
from megalite.config.load import load
from megalite.config.rules.validate import validate
from megalite.config.schema import Config

ROOT = Path(__file__).parents[2]
OTHERS = {"cluster", "experiment"}  # which are no configurations; tests/planner and tests/experiment read them
FILES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in OTHERS
)
OPTIONAL = {  # sections that are none by default
    "model.rope_scaling",
    "model.base",
    "batch.rampup",
    "batch.curriculum",
    "model.attention.latent",
    "model.experts",
    "model.mtp",
    "adapter",
    "kernels",
    "checkpoint.local",
}
ROWS = re.findall(r"^\| `([^`]+)` \| .+? \| `([^`]*)` \| .+ \|$", (ROOT / "docs/configuration.md").read_text(), re.M)


@pytest.mark.parametrize("file", FILES)
def test_every_shipped_file_loads_and_validates(file: str) -> None:
    gpus = re.search(r"_(\d+)gpu\.yaml$", file)
    assert validate(load([str(ROOT / file)]), int(gpus[1]) if gpus else None) == []


def test_every_key_is_documented_and_nothing_else() -> None:
    assert [key for key, _ in ROWS] == [key for key in keys() if key not in sections()]


@pytest.mark.parametrize(("key", "default"), ROWS)
def test_the_documented_default_is_the_default(key: str, default: str) -> None:
    if "[]" in key:
        name, _, leaf = key.partition("[].")
        assert load([], [f"{name}=[{{{leaf}: {default}}}]"]).data == load([], [name + "=[{}]"]).data
    elif (section := key.rpartition(".")[0]) in OPTIONAL:
        assert load([], [f"{key}={default}"]) == load([], [f"{section}={{}}"])
    else:
        assert load([], [f"{key}={default}"]) == Config()
