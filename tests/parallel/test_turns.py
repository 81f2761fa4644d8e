"""Two passes take turns where they give way, and neither goes on after the other has failed."""

from collections.abc import Callable

import pytest
import torch

from megalite.parallel.recompute import _Memory, remembered
from megalite.parallel.turns import Turns, give_way


def noting(notes: list[str], name: str, times: int) -> Callable[[], str]:
    def work() -> str:
        for number in range(times):
            notes.append(f"{name}{number}")
            give_way()
        return name

    return work


@pytest.mark.parametrize(
    ("forwards", "backwards", "expected"),
    [(2, 2, "F0 B0 F1 B1"), (3, 1, "F0 B0 F1 F2"), (1, 3, "F0 B0 B1 B2"), (0, 2, "B0 B1"), (2, 0, "F0 F1")],
)
def test_passes_take_turns(forwards: int, backwards: int, expected: str) -> None:
    notes: list[str] = []
    turns = Turns(noting(notes, "F", forwards), lambda _: None, lambda: None)
    assert turns.run(noting(notes, "B", backwards)) == "F"
    assert " ".join(notes) == expected


def test_whose_turn_it_is_is_told() -> None:
    notes: list[str] = []
    Turns(
        noting(notes, "F", 2),
        lambda forward: notes.append("forward" if forward else "backward"),
        lambda: notes.append("rest"),
    ).run(noting(notes, "B", 1))
    told = "rest forward F0 rest backward B0 rest forward F1 rest backward rest forward rest"
    assert " ".join(notes) == told


def test_a_pass_alone_does_not_wait() -> None:
    notes: list[str] = []
    assert noting(notes, "F", 2)() == "F"
    assert notes == ["F0", "F1"]


def test_turns_pass_in_what_autograd_calls() -> None:
    notes: list[str] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            notes.append("backward")
            give_way()
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    y = Product.apply(Product.apply(x)).sum()
    made = Turns(lambda: (noting(notes, "F", 3)(), 3 * x)[1], lambda _: None, lambda: None).run(y.backward)
    assert notes == ["F0", "backward", "F1", "backward", "F2"]
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]
    assert made.requires_grad


@pytest.mark.parametrize("failing", ["F", "B"])
@pytest.mark.parametrize("at", [0, 1])
def test_neither_goes_on_after_the_other_has_failed(failing: str, at: int) -> None:
    notes: list[str] = []

    def work(name: str) -> Callable[[], str]:
        def run() -> str:
            for number in range(3):
                if (name, number) == (failing, at):
                    raise ZeroDivisionError(name)
                notes.append(f"{name}{number}")
                give_way()
            return name

        return run

    with pytest.raises(ZeroDivisionError, match=failing):
        Turns(work("F"), lambda _: None, lambda: None).run(work("B"))
    assert [note for note in notes if note[0] == failing] == [f"{failing}{number}" for number in range(at)]
    assert len([note for note in notes if note[0] != failing]) == at + (failing == "B")
    assert noting([], "F", 2)() == "F"  # nobody is waited for any longer


def test_full_recompute_remembers_for_each_pass() -> None:
    memories = {"F": _Memory(), "B": _Memory()}

    def layer(name: str) -> None:
        with memories[name].running(again=False):
            give_way()
            remembered(lambda: name)

    Turns(lambda: layer("F"), lambda _: None, lambda: None).run(lambda: layer("B"))
    assert {name: memory.made for name, memory in memories.items()} == {"F": ["F"], "B": ["B"]}
