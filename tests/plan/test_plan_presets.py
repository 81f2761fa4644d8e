"""The run presets for clusters are ones to copy: their memory is what their comments say, and fits."""

import re
from pathlib import Path

import pytest

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.plan.memory.fit import GIB, TENSOR_SHARE, peak_bytes

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "run").glob("*gpu.yaml"))


def test_there_are_presets() -> None:
    assert len(PRESETS) == 4


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("older_fsdp")
def test_a_preset_needs_the_memory_that_it_says(preset: Path) -> None:
    (said,) = re.findall(r"^# Predicted peak: ([\d.]+) GiB with (\d+) ranks\.$", preset.read_text(), re.MULTILINE)
    peak = peak_bytes(check(load([str(preset)]), int(said[1]))) / GIB
    assert f"{peak:.1f}" == said[0]
    assert 0.6 * 80 < peak < TENSOR_SHARE * 80
