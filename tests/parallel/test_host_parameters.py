"""Parameters in host memory: the bits of training without, in every layout."""

from pathlib import Path

import pytest
from host_parameter_cases import CASES, differences
from ranks import Ranks


@pytest.mark.timeout(300)
def test_parameters_on_the_host_change_no_bit_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    assert len(CASES) >= 12
    assert [found for found in ranks.run(differences, str(tmp_path)) if found] == []
    assert list(tmp_path.iterdir()) == []
