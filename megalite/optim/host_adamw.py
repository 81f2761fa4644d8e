"""AdamW whose states live in host memory and whose update runs there (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

Every step copies the gradients and weights of a rank's shard to the host, and the new weights back: 12 bytes per
parameter. The memory for the copies is kept. Between steps, only the weights on the device count. So code that changes
weights, such as loading a checkpoint, need not tell the optimizer. Parameters that live on the host are not copied.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megalite.optim.states import HostStates, local
from megalite.parallel.offload import to_host
from megalite.plan.model.optimizer_states import ADAMW_STATES
from megalite_kernels import FusedAdamW, fused_adamw


class HostAdamW(FusedAdamW):
    """`torch.optim.AdamW(fused=True)` on a CPU, for parameters on any device, with moments of `states`.

    in_place: parameters and gradients are in host memory.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: HostStates,
        in_place: bool = False,
    ) -> None:
        super().__init__(groups, lr, betas, eps, 0, fused_adamw, states.zeros)
        self.memory, self.in_place = states.memory, in_place
        self.copies: dict[Tensor, tuple[Tensor, Tensor]] = {}  # weight and gradient, overwritten by every step

    def states_of(self, param: Tensor) -> dict[str, Tensor]:
        """The moments, placed as the parameter, with local tensors in host memory, and the number of updates."""
        if param not in self.copies and not self.in_place:
            part = local(param).detach()
            self.copies[param] = self.memory.empty_like(part), self.memory.empty_like(part)
        return super().states_of(param)

    def runs_on(self, param: Tensor) -> torch.device:
        return torch.device("cpu")

    def buffers(self) -> list[Tensor]:
        """Host memory for copies of weights and gradients, of parameters whose states exist."""
        return [copy for copies in self.copies.values() for copy in copies]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. All copies to the host are started before the first update."""
        trained = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        states = [self.states_of(param) for _, param in trained]
        skipped = None
        if self.found_inf is not None:
            host = torch.empty_like(self.found_inf, device="cpu", pin_memory=self.memory.stream is not None)
            skipped = to_host(self.found_inf, host, self.memory.stream)
        if self.clip is not None and trained:
            grads = [local(param.grad) for _, param in trained]
            torch._foreach_mul_(grads, self.clip.to(grads[0]))
        arriving = [self._to_host(param) for _, param in trained]
        for (group, param), state, (weight, grad, arrived) in zip(trained, states, arriving, strict=True):
            if arrived is not None:
                arrived.synchronize()
            first, second = (local(state[name]) for name in ADAMW_STATES)
            self.update(
                [weight],
                [grad],
                [first],
                [second],
                [state["step"]],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                found_inf=skipped,
            )
            if not self.in_place:
                local(param).copy_(weight, non_blocking=True)

    def _to_host(self, param: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        assert param.grad is not None
        if self.in_place:
            return local(param).detach(), local(param.grad), None
        stream = self.memory.stream
        pairs = zip((param, param.grad), self.copies[param], strict=True)
        weight, grad = (to_host(local(tensor), host, stream) for tensor, host in pairs)
        return weight, grad, None if stream is None else stream.record_event()
