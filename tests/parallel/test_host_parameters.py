"""Parameters in host memory: the bits of training without, in every layout."""

from pathlib import Path

import pytest
import torch
from file_cases import STEPS, placed
from host_parameter_cases import CASES, differences, on_host
from ranks import Ranks
from toy_jobs import load_and_train, one_rank, train_and_save


@pytest.mark.timeout(300)
def test_parameters_on_the_host_change_no_bit_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    assert len(CASES) >= 12
    assert [found for found in ranks.run(differences, str(tmp_path), timeout=240) if found] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["adamw, one rank", "muon, one rank"])
def test_a_checkpoint_goes_on_with_parameters_on_the_device_and_on_the_host(name: str, tmp_path: Path) -> None:
    here, _ = CASES[name]
    there = on_host(placed(here, "host"))
    with one_rank():
        losses, expected = train_and_save(here, tmp_path / "here", 2, STEPS)
        assert train_and_save(there, tmp_path / "there", 2, STEPS)[0] == losses
        for config, folder in ((there, "here"), (here, "there")):
            *_, again, found = load_and_train(config, tmp_path / folder / "step-00000002", STEPS)
            assert again == losses[2:]
            assert all(torch.equal(found[name].values, part.values) for name, part in expected.items())
