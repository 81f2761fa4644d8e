"""The line that tells how long layers took to compile."""

import re
from typing import Any

import pytest
import torch

from megalite.distributed.health.activity import Activity
from megalite.train.compile_time import CompileTime, progressing
from megalite.train.report import Silent


class Lines(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str, style: str = "") -> None:
        self.said.append(text)


@pytest.mark.filterwarnings("ignore")
def test_what_is_new_is_told_after_the_step_that_compiled_it() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    compiled, report = torch.compile(layer, backend="aot_eager", dynamic=False), Lines()
    compiled(torch.ones(2))  # before the run
    time: Any = CompileTime()
    for sizes in ((2,), (3,), (3,), (4, 5)):
        for size in sizes:
            compiled(torch.ones(size))
        time.stepped(1, None, None, report)
    first, second = report.said
    assert re.fullmatch(r"compiled 1 graph of layers in \d+\.\d s", first)
    assert re.fullmatch(r"compiled 2 graphs of layers in \d+\.\d s", second)


@pytest.mark.filterwarnings("ignore")
def test_the_begin_and_the_end_of_a_compilation_are_progress() -> None:
    """One after another may take longer than `train.timeout`."""
    activity, long_ago = Activity(), -1e9
    seen: list[float] = []

    def slow(graph: Any, _: Any) -> Any:
        seen.append(activity.ticked)
        activity.ticked = long_ago
        return graph.forward

    def run(size: int) -> None:
        activity.ticked = long_ago
        torch.compile(lambda x: x.sin() + 1, backend=slow, dynamic=False)(torch.ones(size))
        seen.append(activity.ticked)

    with progressing(activity):
        run(2)
    assert min(seen) > long_ago
    run(3)
    assert seen[2:] == [long_ago, long_ago], "only while it trains"
