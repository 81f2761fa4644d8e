"""Muon over matrices that are sharded in any way (Jordan 2024, kellerjordan.github.io/posts/muon).

    m = μ·m + (1 − μ)·g        u = (1 − μ)·g + μ·m with Nesterov, else m
    w = (1 − lr·λ)·w − lr·s·NS(u)                       (NS: see `newton_schulz`; s: `newton_schulz.scale`)

The momentum m is an average, with the same values as the state of torch.optim.Muon. A sum would be 1/(1 − μ) times as
large and give the same directions. NS needs the whole matrix, since a shard alone would get another direction. So every
matrix has an owner, one of the ranks that hold its parts, which computes the update for all of them (`plan.muon`). The
arithmetic is the same in every layout. Equal gradients therefore give bitwise equal updates.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.optim.exchange import Arriving, PieceExchange, Views
from megalite.optim.newton_schulz import COEFFICIENTS, SCALES, newton_schulz, scale, working_dtype
from megalite.optim.states import DeviceStates, HostStates, States, local
from megalite.optim.streams import Bucket
from megalite.plan.muon import BUCKET_BYTES, Box, MuonPlan, boxes, matrices_of
from megalite_kernels import FusedAdamW, muon_momentum, muon_update
from megalite_kernels.backend import Backend


@dataclass(frozen=True)
class _Target:
    """A matrix to update: a parameter, or one of its matrices; with its parameter group.

    here: its index in this rank's part of the parameter, () if that is one matrix; None: the rank holds nothing of it.
    """

    param: Tensor
    group: dict[str, Any]
    here: tuple[int, ...] | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.param.shape[-2:]
        return rows, columns

    def part(self, tensor: Tensor) -> Tensor:
        """The part of the matrix on this rank, taken from `tensor`, which is placed like the parameter."""
        assert self.here is not None
        return local(tensor)[self.here]

    @property
    def gradient(self) -> Tensor:
        """The part of the gradient on this rank."""
        assert self.param.grad is not None
        return self.part(self.param.grad)


@dataclass(frozen=True)
class _Bucket:
    """Indices of matrices that are exchanged together: those that this rank holds parts of, and those that it owns."""

    matrices: list[int]
    owned: list[int]
    gather: PieceExchange
    scatter: PieceExchange


Params = Sequence[tuple[Tensor, dict[str, Any]]]  # each with its parameter group
Targets = Sequence[_Target]


class Muon(torch.optim.Optimizer):
    """Muon for matrices, in parameter groups that may have different settings.

    params: matrices of one data type, or stacks `[..., rows, columns]` of matrices that are updated one by one, in the
    same order on all ranks. They are DTensors over exactly the ranks of `stage`, or plain tensors, which every rank
    holds whole. Gradients have the placement of their parameter. stage: `Mesh.stage`; None means that there is one
    rank. steps: the number of Newton–Schulz steps. scale: a rule of `newton_schulz.scale`; with the default, AdamW's
    learning rate and weight decay carry over. bucket_bytes: see `MuonPlan`. states: where the momentum is kept; None:
    on the device. backend: what averages gradients, updates weights and computes symmetric products, see
    `megalite_kernels.muon` and `symmetric_product`; Triton's kernels take contiguous parameters only. copy_of: the copy
    of a parameter, in any data type and placed alike, that updates write too, or None; all have one or none has.
    parameters: the store of parameters and gradients in host memory, which pass through its device, as states must
    then; None: they are on the device.

    A training loop may set two tensors before a step, as for `FusedAdamW`. found_inf is float32 of one element; if it
    is not 0, nothing changes. clip is 0-dimensional; gradients are multiplied by it, but not overwritten.

    `state` has one tensor for each parameter, `momentum_buffer`, of the parameter's data type and placement. A step is
    collective over `stage`; all ranks must have gradients of the same parameters. The constructor raises ValueError for
    invalid settings and shapes. The first step raises it for parameters that are not laid out over `stage`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        stage: dist.ProcessGroup | None = None,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        weight_decay: float = 0.1,
        scale: str = "match_rms_adamw",
        coefficients: tuple[float, float, float] = COEFFICIENTS,
        bucket_bytes: int = BUCKET_BYTES,
        states: States | None = None,
        backend: Backend = "auto",
        copy_of: Callable[[Tensor], Tensor | None] = lambda _: None,
        parameters: HostStates | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "steps": steps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "scale": scale, "coefficients": coefficients})
        self.stage, self.bucket_bytes, self.states = stage, bucket_bytes, states or DeviceStates()
        self.backend: Backend = backend
        self.copy_of, self.parameters = copy_of, parameters
        self.found_inf: Tensor | None = None
        self.clip: Tensor | None = None
        self._planned: dict[tuple[int, ...], tuple[list[_Target], list[_Bucket]]] = {}
        # States and gradients elsewhere, one by one in the order of a step's matrices.
        self._momenta: Iterator[Bucket] = iter(())
        self._gradients: Iterator[Bucket] = iter(())
        for group in self.param_groups:
            if group["scale"] not in SCALES:
                raise ValueError(f"scale {group['scale']!r} is none of {', '.join(SCALES)}")
            if not 0 <= group["momentum"] < 1 or group["steps"] < 1:
                raise ValueError(f"momentum {group['momentum']} is not in [0, 1), or steps {group['steps']} is below 1")
        everything = [param for group in self.param_groups for param in group["params"]]
        if any(param.ndim < 2 for param in everything) or len({param.dtype for param in everything}) > 1:
            raise ValueError("the parameters are not all matrices, or stacks of matrices, of one data type")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        params = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not params:
            return
        targets, buckets = self._buckets(params)
        if not self.states.on_device:
            order = [targets[index] for bucket in buckets for index in bucket.matrices]
            momenta = [[target.part(self._momentum(target.param))] for target in order]
            _, device = self._updates(params[0][0])
            self._momenta = self.states.streamed(momenta, device)
            if self.parameters is not None:
                self._gradients = self.parameters.streamed([[target.gradient] for target in order], device)
        coming = self._gather(buckets[0], targets)
        returning: Arriving | None = None
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            arriving = coming
            if following is not None:
                coming = self._gather(following, targets)
            leaving = self._orthogonalize(bucket, arriving.wait(), targets)
            if returning is not None:
                self._apply(returning.wait(), targets)
            returning = leaving
        if returning is not None:
            self._apply(returning.wait(), targets)
        for others in (self._momenta, self._gradients):
            next(others, None)  # the last has been used
        if self.parameters is not None:
            self.parameters.settle()  # the host may read weights now, and the next step copies them

    def _gather(self, bucket: _Bucket, targets: Targets) -> Arriving:
        """Update the momentum with the gradients, and start to send u to the owners of the matrices."""
        outgoing = bucket.gather.begin(*self._updates(targets[0].param))
        together: dict[object, list[int]] = {}
        for index in bucket.matrices:
            # States elsewhere come to the device one by one, in this order, to take little memory there.
            key = (id(targets[index].group), index in outgoing.views) if self.states.on_device else index
            together.setdefault(key, []).append(index)
        for indices in together.values():
            self._average([targets[index] for index in indices], [outgoing.views.get(index, []) for index in indices])
        return outgoing.send(self.stage)

    def _average(self, targets: Targets, sent: Sequence[Sequence[tuple[Box, Tensor]]]) -> None:
        """Update the momentum of matrices of one group. sent: for each the view that gets this rank's part of u, or
        nothing if this rank does not send it; the same for all.
        """
        here = [target.part(self._momentum(target.param)) for target in targets] if self.states.on_device else None
        muon_momentum(
            [target.gradient for target in targets] if self.parameters is None else next(self._gradients),
            here or next(self._momenta),
            [view for views in sent for _, view in views],
            momentum=targets[0].group["momentum"],
            nesterov=targets[0].group["nesterov"],
            clip=self.clip,
            found_inf=self.found_inf,
            backend=self.backend,
        )

    def _orthogonalize(self, bucket: _Bucket, arrived: Views, targets: Targets) -> Arriving:
        """Orthogonalize the matrices that this rank owns, and start to send back the parts of the results."""
        outgoing = bucket.scatter.begin(*self._updates(targets[0].param))
        for index in bucket.owned:
            group, (rows, columns) = targets[index].group, targets[index].shape
            update = newton_schulz(
                _whole(rows, columns, arrived[index]), group["steps"], group["coefficients"], self.backend
            )
            outgoing.put(index, update, (range(rows), range(columns)))
            del update  # makes room for the next
        return outgoing.send(self.stage)

    def _apply(self, updates: Views, targets: Targets) -> None:
        parts = [(targets[index], update) for index, views in updates.items() for _, update in views]  # one of each
        weights = [target.part(target.param) for target, _ in parts]
        if self.parameters is None:
            self._write(weights, parts)
            return
        _, device = self._updates(targets[0].param)
        for here, part in zip(self.parameters.streamed([[each] for each in weights], device), parts, strict=True):
            self._write(here, [part])

    def _write(self, weights: Bucket, parts: Sequence[tuple[_Target, Tensor]]) -> None:
        """Update weights on the device. parts: the matrix of each, and its update."""
        groups = [target.group for target, _ in parts]
        scales = [scale(target.group["scale"], *target.shape) for target, _ in parts]
        muon_update(
            weights,
            [update for _, update in parts],
            [group["lr"] * each for group, each in zip(groups, scales, strict=True)],
            [1 - group["lr"] * group["weight_decay"] for group in groups],
            copies=[target.part(copy) for target, _ in parts if (copy := self.copy_of(target.param)) is not None],
            found_inf=self.found_inf,
            backend=self.backend,
        )

    def _updates(self, param: Tensor) -> tuple[torch.dtype, torch.device]:
        """The data type and the device of updates."""
        device = param.device if self.parameters is None else self.parameters.updates_on(param)
        return working_dtype(param, device), device

    def states_of(self, param: Tensor) -> dict[str, Tensor]:
        """The momentum of a parameter, created as zeros if there is none. Waits for a step that is writing it."""
        self._momentum(param)
        self.states.settle()
        return self.state[param]

    def _momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = self.states.zeros(param, param.dtype)
        return state["momentum_buffer"]

    def buffers(self) -> list[Tensor]:
        """Tensors kept beside states: none. The buffers of exchanges exist during a step only."""
        return []

    def _buckets(self, params: Params) -> tuple[list[_Target], list[_Bucket]]:
        """The matrices of `params`, and their buckets. They are planned once, since usually all have gradients."""
        key = tuple(id(each) for pair in params for each in pair)
        if key not in self._planned:
            self._planned[key] = self._plan(params)
        return self._planned[key]

    def _plan(self, params: Params) -> tuple[list[_Target], list[_Bucket]]:
        rank, ranks = (0, 1) if self.stage is None else (self.stage.rank(), self.stage.size())
        targets, matrices = [], []
        for param, group in params:
            held = held_by(param, rank, ranks)
            matrices += matrices_of(tuple(param.shape), held, group["steps"])
            places = product(*map(range, param.shape[:-2]))
            targets += [_Target(param, group, _index_in(held[rank], place)) for place in places]
        plan = MuonPlan(matrices, self._updates(params[0][0])[0].itemsize, self.bucket_bytes)
        buckets = [
            _Bucket(
                [index for index in indices if targets[index].here is not None],
                [index for index in indices if plan.owners[index] == rank],
                PieceExchange(plan.gathered(indices), rank, ranks),
                PieceExchange(plan.returned(indices), rank, ranks),
            )
            for indices in plan.buckets
        ]
        return targets, buckets


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, with the parameter groups and states of both.

    `found_inf` and `clip` are as for `Muon`.
    """

    def __init__(self, muon: Muon, adamw: FusedAdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.found_inf: Tensor | None = None
        self.clip: Tensor | None = None
        self.optimizers = muon, adamw
        self._muons = {param for group in muon.param_groups for param in group["params"]}
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state  # groups are shared already: `param_groups` has the same dictionaries

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for optimizer in self.optimizers:
            optimizer.found_inf, optimizer.clip = self.found_inf, self.clip
            optimizer.step()

    def states_of(self, param: Tensor) -> dict[str, Tensor]:
        """The states of a parameter, from the optimizer that updates it. Missing states are created as zeros."""
        muon, adamw = self.optimizers
        return muon.states_of(param) if param in self._muons else adamw.states_of(param)

    def buffers(self) -> list[Tensor]:
        """Tensors that Muon and AdamW keep beside states."""
        return [buffer for optimizer in self.optimizers for buffer in optimizer.buffers()]


def held_by(param: Tensor, rank: int, ranks: int) -> tuple[Box, ...]:
    """The box of `param` that each of `ranks` ranks holds, as seen by `rank`.

    Raises ValueError if the parameter is not laid out over these ranks, row-major.
    """
    if not isinstance(param, DTensor):
        return boxes(tuple(param.shape), (ranks,), ())
    mesh, placements = param.device_mesh, param.placements
    # FSDP2 cuts the tensor-parallel part once more, though FSDP2's mesh axis is first: a strided shard.
    order = sorted(range(mesh.ndim), key=lambda axis: hasattr(placements[axis], "split_factor"))
    cuts = tuple((axis, dim) for axis in order if (dim := getattr(placements[axis], "dim", None)) is not None)
    found = boxes(tuple(param.shape), tuple(mesh.shape), cuts)
    here = list(product(*map(range, mesh.shape))).index(tuple(mesh.get_coordinate() or ()))
    if len(found) != ranks or here != rank or tuple(map(len, found[rank])) != tuple(param.to_local().shape):
        raise ValueError(
            f"a matrix of shape {tuple(param.shape)}, placed as {placements} on {mesh}, is not on the stage's ranks"
        )
    return found


def _index_in(box: Box, place: Sequence[int]) -> tuple[int, ...] | None:
    """The index, in a rank's box of a stack, of the matrix at `place` in the stack; None if it is not in the box."""
    pairs = list(zip(place, box[:-2], strict=True))
    return tuple(held.index(at) for at, held in pairs) if all(at in held for at, held in pairs) else None


def _whole(rows: int, columns: int, pieces: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """A whole matrix, put together from all of its boxes."""
    if len(pieces) == 1:
        return pieces[0][1]
    whole = pieces[0][1].new_empty(rows, columns)
    for (lines, across), piece in pieces:
        whole[lines.start : lines.stop, across.start : across.stop] = piece
    return whole
