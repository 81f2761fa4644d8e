"""What is not finite is named, and becomes no checkpoint and no run's state."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor
from toy_jobs import MODEL, config_of, make, one_rank, progress_at, restorer, save, saver

from megalite.base.errors import InputError, Unhealthy
from megalite.checkpoint.store import finite
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.finite import not_finite
from megalite.checkpoint.store.manifest import complete, step_of
from megalite.checkpoint.store.save_events import Failed
from megalite.config.layout import Layout
from megalite.config.schema import Config
from megalite.train.build import Job

NAME = "layers.0.mlp.down.weight"
numbers = st.floats(width=32) | st.sampled_from([3e38, -3e38, 1e-45])
tensors = st.lists(numbers, max_size=4).flatmap(
    lambda values: st.sampled_from([torch.float32, torch.float64]).map(lambda dtype: torch.tensor(values, dtype=dtype))
)


@given(st.dictionaries(st.sampled_from("abcd"), tensors))
def test_exactly_what_is_not_finite_is_named(given: dict[str, Tensor]) -> None:
    counted = {"count": torch.tensor([3])}
    assert not_finite({**counted, **given}) == [name for name, part in given.items() if not part.isfinite().all()]


def test_of_many_names_some_are_told() -> None:
    with pytest.raises(ValueError, match=r"^NaN or infinity in 0, 1, 2 and 2 more$"):
        finite.refuse_poisoned({str(number): torch.tensor(torch.nan) for number in range(5)})


@pytest.fixture
def job() -> Iterator[Job]:
    with one_rank():
        yield make(config_of(Layout(), replace(MODEL, layers=1)))


def poison(job: Job, what: str, value: float = torch.nan) -> None:
    """One element of a weight or of one of its moments."""
    param = dict(job.named_parameters())[NAME]
    tensors = {"model": param, **{f"optimizer.{name}": part for name, part in job.optimizer.state[param].items()}}
    with torch.no_grad():
        tensors[what].to_local().flatten()[0] = value


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("what", ["model", "optimizer.exp_avg", "optimizer.exp_avg_sq"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_poisoned_state_is_not_saved(job: Job, what: str, value: float, in_background: bool, tmp_path: Path) -> None:
    save(job, tmp_path, 1)
    poison(job, what, value)
    job.config.checkpoint.async_ = in_background
    told = rf"step 2: NaN or infinity in {what}\.{NAME}; it is not saved"
    with saver(job, tmp_path) as writer:
        with nullcontext() if in_background else pytest.raises(Unhealthy, match=told):
            writer.save(progress_at(job, 2))
        for at_last in (writer.settle, lambda: writer.save(progress_at(job, 3)), writer.finish):
            with pytest.raises(Unhealthy, match=told):
                at_last()
        (news,) = writer.news()
    assert news == Failed(2, f"NaN or infinity in {what}.{NAME}", poisoned=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_training_does_not_wait_for_the_look_at_what_is_saved(job: Job, tmp_path: Path) -> None:
    looked: list[str] = []
    with (
        patch("megalite.checkpoint.run.save.refuse_poisoned", lambda _: looked.append(current_thread().name)),
        saver(job, tmp_path) as writer,
    ):
        writer.save(progress_at(job, 1))
    assert [name.startswith("checkpoint") for name in looked] == [True]


def saved_poisoned(config: Config, folder: Path) -> str:
    """What a rank hears when a weight of the last rank is poisoned."""
    job = make(config)
    if job.mesh.rank == config.parallel.layout.world_size - 1:
        poison_last(job)
    with saver(job, folder) as writer:
        try:
            writer.save(progress_at(job, 1))
            writer.settle()
        except Unhealthy as error:
            return str(error)
    return ""


def poison_last(job: Job) -> None:
    *_, (_, param) = job.named_parameters()
    with torch.no_grad():
        param.to_local().flatten()[-1] = torch.inf  # type: ignore[attr-defined]


def test_all_ranks_hear_what_one_has_found(tmp_path: Path, ranks: Ranks) -> None:
    told = ranks.run(saved_poisoned, config_of(Layout(pp=2, dp_shard=2, tp=2)), tmp_path)
    assert set(told) == {"step 1: NaN or infinity in model.head.output.weight; it is not saved"}
    assert complete(tmp_path) == []


def test_a_poisoned_checkpoint_is_set_aside_and_the_one_before_is_used(job: Job, tmp_path: Path) -> None:
    save(job, tmp_path, 1)
    poison(job, "model")
    with patch("megalite.checkpoint.run.save.refuse_poisoned"):  # as an earlier version has saved it
        path = save(job, tmp_path, 2)
    with pytest.raises(DamagedError, match=rf"step-00000002: NaN or infinity in model\.{NAME}$"):
        restorer(job).weights(str(path))
    said: list[str] = []
    progress = restorer(job).newest(tmp_path, said.append)
    assert progress is not None
    assert progress.step == 1
    assert f"NaN or infinity in model.{NAME}; it is set aside as step-00000002.damaged" in said[0]
    assert [step_of(found) for found in complete(tmp_path)] == [1]


def test_a_negative_square_is_damage_since_the_next_step_would_make_nan_of_it(job: Job, tmp_path: Path) -> None:
    save(job, tmp_path, 1)  # makes the moments
    poison(job, "optimizer.exp_avg_sq", -1e-9)
    path = save(job, tmp_path, 2)
    with pytest.raises(DamagedError, match=rf"negative squares in optimizer\.exp_avg_sq\.{NAME}$"):
        restorer(job).all(path)


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(job: Job, tmp_path: Path) -> None:
    job.config.run.seed = 1 << 63
    with pytest.raises(InputError, match="a checkpoint could not hold this configuration"):
        saver(job, tmp_path)
    assert list(tmp_path.iterdir()) == []
