"""Muon's passes in Triton's kernels: the bytes that a step moves beside Newton–Schulz, and that it is the same step."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from rounding import DEVICE, random
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.optim import muon
from megalite.optim.muon import Muon
from megalite.optim.states import DeviceStates, HostStates
from megalite_kernels.backend import Backend
from megalite_kernels.muon import bytes_moved

SHAPES = [(64, 96), (96, 64), (33, 7), (2, 40, 64)]
OVERWRITTEN = {
    "copy_": {"self"},
    "muon_momentum": {"directions"},
    "muon_update": {"copies"},
}  # arguments that are not read


class Moved(TorchDispatchMode):
    """Bytes that operators read and write: each argument and each new result once, and what is changed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        schema, name = operator._schema, operator._schema.name.partition("::")[2]
        aliases = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
        if aliases or "empty" in name:  # moves nothing
            return result
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | (kwargs or {})
        for argument in schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = argument.name not in OVERWRITTEN.get(name, ())
            self.bytes += (reads + writes) * size(given.get(argument.name))
        if not any(each.alias_info for each in schema.returns):
            self.bytes += size(result)
        return result


def size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    return value.nbytes if isinstance(value, Tensor) and value.numel() > 1 else 0  # numbers do not count


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, dtype=torch.float32, seed=at)) for at, shape in enumerate(SHAPES)]


def take_step(params: list[nn.Parameter], optimizer: Muon, bad: bool) -> float:
    """Returns the bytes that are moved for each parameter."""
    for at, param in enumerate(params):
        param.grad = random(*param.shape, dtype=torch.float32, seed=10 + at)
        if bad:
            param.grad[..., 0].fill_(torch.nan)
    optimizer.clip, optimizer.found_inf = torch.tensor(0.5, device=DEVICE), torch.tensor([float(bad)], device=DEVICE)
    with Moved() as moved:
        optimizer.step()
    return moved.bytes / sum(param.numel() for param in params)


@pytest.mark.parametrize(("backend", "expected"), [("triton", 28), ("torch", 100)])
def test_bytes_of_a_parameter(backend: Backend, expected: int) -> None:
    """The passes themselves, and results that are copied into the buffer that returns them; not Newton–Schulz."""
    params = parameters()
    optimizer = Muon(params, backend=backend)
    assert bytes_moved(1)[0] + 2 * 2 == 28
    with (
        patch.object(muon, "working_dtype", lambda *_: torch.bfloat16),
        patch.object(muon, "newton_schulz", lambda matrix, *_: matrix),
    ):
        take_step(params, optimizer, bad=False)  # makes the momentum
        assert take_step(params, optimizer, bad=False) == expected


@pytest.mark.parametrize("states", [DeviceStates, HostStates])
def test_a_step_in_kernels_is_that_of_torch(states: Any) -> None:
    """But for roundings; and a skipped one changes nothing."""
    ours, theirs = parameters(), parameters()
    one, other = Muon(ours, states=states(), backend="triton"), Muon(theirs, backend="torch")
    for step in range(3):
        before = [param.detach().clone() for param in ours]
        for params, optimizer in ((ours, one), (theirs, other)):
            take_step(params, optimizer, bad=step == 1)
        assert all(map(torch.equal, ours, before)) is (step == 1)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)
        found, expected = (each.states_of(param)["momentum_buffer"] for each, param in ((one, mine), (other, its)))
        torch.testing.assert_close(found.to(DEVICE), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_updates_write_copies(backend: Backend) -> None:
    """In float16, to which the interpreter rounds as it should; a skipped step leaves them alone."""
    params = parameters()
    copies = {param: torch.zeros_like(param, dtype=torch.float16) for param in params}
    optimizer = Muon(params, backend=backend, copy_of=copies.get)
    take_step(params, optimizer, bad=True)
    assert not any(copy.any() for copy in copies.values())
    take_step(params, optimizer, bad=False)
    assert all(torch.equal(copy, param.half()) for param, copy in copies.items())
