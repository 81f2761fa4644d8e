"""Parameters in host memory: the bits of training without, in every layout."""

from pathlib import Path

import pytest
import torch
from file_cases import STEPS, placed
from host_parameter_cases import CASES, differences, on_host
from ranks import Ranks
from toy_jobs import advance, load_and_train, make, one_rank, parts, train_and_save

from megalite.commands.verify import random_batch
from megalite.train.step import gradients, update


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


@pytest.mark.parametrize(
    ("name", "update_on"), [("adamw, one rank", "device"), ("adamw, one rank", "host"), ("muon, one rank", "device")]
)
def test_a_bad_step_changes_nothing(name: str, update_on: str) -> None:
    with one_rank():
        job = make(on_host(placed(CASES[name][0], "host", update_on=update_on)))
        advance(job, 0, 1)
        before = parts(job)
        loss = gradients(job, random_batch(job, 1))
        first = next(param for _, param in job.named_parameters())
        assert first.grad is not None
        first.grad.to_local()[0, 0] = torch.nan  # type: ignore[attr-defined]
        assert not torch.isfinite(torch.tensor(update(job, loss, 1).read().norm))
        after = parts(job)
        assert all(torch.equal(after[name].values, part.values) for name, part in before.items())
        advance(job, 2, 3)
        assert not torch.equal(parts(job)["embed.weight"].values, before["embed.weight"].values)
