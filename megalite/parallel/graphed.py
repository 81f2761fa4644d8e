"""CUDA graphs of a micro-batch: the host launches all kernels of its forward and backward by one call.

A graph has the kernels, the addresses that they were given, and the numbers that the host knew. So all that differs
between micro-batches is in tensors that stay where they are: tokens, targets, and the factor of the loss. Sums of
gradients stay where they are as well; so there are two graphs, one of the first micro-batch of a step, which writes
them, and one of all others, which adds to them.

With tensor parallelism, collectives are in a graph, too, on NCCL's streams. Every one that a micro-batch begins is
waited for in it, which joins these to the captured stream; nothing in it asks the host or needs its group connected
anew, as the step before has run the same. All ranks count micro-batches alike, so they capture the same ones. Sums of a
step, of gradients that every rank has a part of, come after the graphs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.base.errors import InputError, Problem
from megalite.distributed.health.activity import Activity
from megalite.distributed.health.clock import SectionClock
from megalite.parallel.copies import Copies
from megalite.parallel.pipeline import Pipeline, StepInputs

# Section of a rank's clock. Waits for other ranks cannot be told from a rank's own work in it.
GRAPHS = "graphs"


class Capture(Protocol):
    """Device that captures the work it is given."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Inside, work is done as ever, where `graph_of` will capture the same."""

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call `work` without having the device do it. Returns a function that has the device do it."""


class CudaGraphs:
    """Captures CUDA graphs, on a stream of their own. They share their memory, so none runs beside another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool: Any = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Work on the stream of captures, which autograd's nodes and cuBLAS' memory are bound to."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        """The graph of `work`. Waits for the device, once."""
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile: they pin batches, write checkpoints, and look whether NCCL's calls have ended.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        self.pool = graph.pool()
        return graph.replay


def captures_on(device: torch.device) -> Capture:
    """The `Capture` of `device`. Raises InputError for a CPU, which has no graphs."""
    if device.type != "cuda":
        rule = f"needs CUDA, and this job is on a {device.type.upper()}"
        raise InputError([Problem("train.cuda_graph", rule, "use false", True)])
    return CudaGraphs(device)


@dataclass(frozen=True)
class _Inputs:
    """Tensors at fixed places: a micro-batch and the factor of the loss, which graphs read; the sum of losses, to which
    they add."""

    tokens: Tensor
    targets: Tensor
    positions: object  # are those of all micro-batches, whose samples are one document each
    scale: Tensor
    total: Tensor

    @staticmethod
    def like(step: StepInputs, dtype: torch.dtype) -> "_Inputs":
        """Room for micro-batches like those of a step. dtype: of the factor."""
        tokens, targets = step.tokens[0], step.targets[0]
        scale = torch.empty((), dtype=dtype, device=tokens.device)
        total = torch.empty((), dtype=torch.float64, device=tokens.device)
        return _Inputs(torch.empty_like(tokens), torch.empty_like(targets), step.positions[0], scale, total)

    def step(self) -> StepInputs:
        """A step of one micro-batch."""
        return StepInputs([self.tokens], [self.targets], [self.positions], self.scale)


class GraphedPipeline:
    """Runs steps of any number of micro-batches by graphs of `pipeline`, whose step has one, and no messages.

    The first step runs without graphs, which compiles kernels and lets libraries take their memory; the next captures
    them. trained: parameters that get gradients. copies: of parameters, with which layers compute. clock: times what
    graphs take, with what they wait for other ranks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        trained: Sequence[DTensor],
        copies: Sequence[Copies],
        capture: Capture,
        activity: Activity,
        clock: SectionClock,
    ) -> None:
        self.pipeline, self.trained, self.copies = pipeline, trained, copies
        self.capture, self.activity, self.clock = capture, activity, clock
        self._inputs: _Inputs | None = None
        self._warm: set[bool] = set()  # kinds of micro-batches that have run: whether they add to sums of gradients
        self._graphs: dict[bool, Callable[[], None]] = {}  # by kind
        self._sums: list[Any] = []  # gradients, which the graphs write

    def run(self, step: StepInputs) -> Tensor:
        """Run one step, as `Pipeline.run` does. The sum that it returns is kept until the next step alone."""
        for copies in self.copies:
            copies.refresh()  # before the graphs, which would have it done in every micro-batch
        if self._inputs is None:
            self._inputs = _Inputs.like(step, torch.promote_types(self.pipeline.activation.dtype, torch.float32))
        inputs = self._inputs
        inputs.scale.fill_(step.scale)
        inputs.total.zero_()
        for number, (tokens, targets) in enumerate(zip(step.tokens, step.targets, strict=True), start=1):
            self.activity(f"micro-batch {number} of {len(step.tokens)}")
            inputs.tokens.copy_(tokens)
            inputs.targets.copy_(targets)
            self._run_micro_batch(adds=number > 1)
        return inputs.total

    def _run_micro_batch(self, adds: bool) -> None:
        # A graph that adds needs the place of the sums, which the other one has made.
        if adds not in self._graphs and adds in self._warm and (not adds or self._graphs):
            self._graphs[adds] = self.capture.graph_of(self._work)
            if not adds:
                self._sums = [param.grad for param in self.trained]
        if adds not in self._graphs:
            with self.capture.warming_up():
                self._work()
            self._warm.add(adds)
            return
        with self.clock.timed(GRAPHS):
            self._graphs[adds]()
        if not adds:
            for param, total in zip(self.trained, self._sums, strict=True):
                param.grad = total  # the optimizer has let go of it

    def _work(self) -> None:
        assert self._inputs is not None
        self._inputs.total.add_(self.pipeline.run(self._inputs.step()))
