"""An optimizer with its states on the host is the one with states on the device, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from toy_jobs import Parts, advance, config_of, load_and_train, make, one_rank, parts, train_and_save

from megalite.config.layout import Layout
from megalite.config.schema import Config
from megalite.optim import host_adamw
from megalite.optim.host_adamw import HostAdamW
from megalite.optim.states import HostStates
from megalite.plan.model.optimizer_states import ADAMW_STATES

HERE = config_of(Layout())
HOST = replace(HERE, optim=replace(HERE.optim, placement="host", update_on="host"))
MUON = replace(HERE, optim=replace(HERE.optim, name="muon"))
MUON_HOST = replace(HERE, optim=replace(MUON.optim, placement="host", update_on="host"))
PAIRS = {"adamw": (HERE, HOST), "muon": (MUON, MUON_HOST)}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def same(one: Parts, other: Parts) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name].values, other[name].values) for name in one)


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_bitwise_those_on_the_device(name: str) -> None:
    here, host = map(make, PAIRS[name])
    assert advance(here, 0, 4) == advance(host, 0, 4)
    assert same(parts(here), parts(host))


def test_every_state_is_made_by_the_store_of_its_place() -> None:
    made: list[torch.Tensor] = []
    original = HostStates.zeros

    def zeros(self: HostStates, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(original(self, param, dtype))
        return made[-1]

    with patch.object(HostStates, "zeros", zeros):
        job = make(MUON_HOST)
        advance(job, 0, 1)
    states = [job.optimizer.states_of(param) for _, param in job.named_parameters()]
    kept = [tensor for state in states for name, tensor in state.items() if name != "step"]
    assert {id(tensor) for tensor in kept} == {id(tensor) for tensor in made}
    muons = sum([*state] == ["momentum_buffer"] for state in states)
    assert len(job.optimizer.buffers()) == 2 * (len(states) - muons) > 0, "AdamW's weights and gradients"
    assert 0 < muons < len(states)


def test_settings_reach_the_optimizer() -> None:
    here, host = make(HERE).optimizer, make(HOST).optimizer
    assert isinstance(host, HostAdamW)
    assert len(here.param_groups) == len(host.param_groups) == 2
    for one, other in zip(here.param_groups, host.param_groups, strict=True):
        assert [one[key] for key in ("lr", "betas", "eps", "weight_decay")] == [
            other[key] for key in ("lr", "betas", "eps", "weight_decay")
        ]


def test_states_are_there_before_the_first_step_and_placed_as_parameters() -> None:
    job = make(HOST)
    for name, param in job.named_parameters():
        for moment in ADAMW_STATES:
            state = job.optimizer.states_of(param)[moment]
            assert state.placements == param.placements, name
            assert state.shape == param.shape
            assert not state.to_local().any()


def test_every_step_copies_each_gradient_and_weight_once() -> None:
    job = make(HOST)
    copied: list[torch.Tensor] = []
    original = host_adamw.to_host

    def to_host(tensor: torch.Tensor, *given: Any) -> torch.Tensor:
        copied.append(tensor)
        copy = original(tensor, *given)
        assert copy.data_ptr() != tensor.data_ptr()
        return copy

    with patch.object(host_adamw, "to_host", to_host):
        advance(job, 0, 2)
    parameters = sum(param.numel() for _, param in job.named_parameters())
    assert sum(tensor.numel() for tensor in copied) == 2 * (2 * parameters + 1)  # and whether to skip the update


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(HOST, HOST), (HOST, HERE), (HERE, HOST), (MUON_HOST, MUON), (MUON, MUON_HOST)],
    ids=["both", "off", "on", "off, muon", "on, muon"],
)
def test_a_checkpoint_continues_with_and_without(saved: Config, loaded: Config, tmp_path: Path) -> None:
    losses, after = train_and_save(saved, tmp_path, at=2, steps=4)
    _, _, again, found = load_and_train(loaded, tmp_path / "step-00000002", 4)
    assert again == losses[2:]
    assert same(found, after)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    job = make(HOST)
    before = parts(job)
    job.optimizer.step()
    assert same(before, parts(job))
