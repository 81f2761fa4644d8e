"""AdamW whose states live in host memory and whose update runs there (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

Every step copies the gradients and weights of a rank's shard to the host, and the new weights back: 12 bytes per
parameter. The memory for the copies is kept. Between steps, only the weights on the device count. So code that changes
weights, such as loading a checkpoint, need not tell the optimizer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.parallel.host_memory import HostMemory
from megalite.parallel.offload import to_host
from megalite.plan.model.optimizer_states import ADAMW_STATES
from megalite_kernels import fused_adamw


class HostAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW(fused=True)` on a CPU, for DTensors on any device.

    `state` is complete from the beginning. Moments are DTensors with the placement of their parameter; their local
    tensors are in host memory.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None  # as for torch's fused optimizers: a float32 1 skips the update
        self.clip: Tensor | None = None  # gradients are multiplied by it
        self._memory = HostMemory()
        self.copies: dict[Tensor, tuple[Tensor, Tensor]] = {}  # weight and gradient, overwritten by every step
        for group in self.param_groups:
            for param in group["params"]:
                if not param.is_meta:  # parameters without data are not trained
                    self.state[param] = _empty_state(param)
                    local = param.to_local().detach()
                    self.copies[param] = self._memory.empty_like(local), self._memory.empty_like(local)

    def states_of(self, param: DTensor) -> dict[str, Tensor]:
        """The moments, placed as the parameter, with local tensors in host memory, and the number of updates."""
        return self.state[param]

    def buffers(self) -> list[Tensor]:
        """Host memory for copies of weights and gradients."""
        return [copy for copies in self.copies.values() for copy in copies]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. All copies to the host are started before the first update."""
        skipped = None
        if self.found_inf is not None:
            host = torch.empty_like(self.found_inf, device="cpu", pin_memory=self._memory.stream is not None)
            skipped = to_host(self.found_inf, host, self._memory.stream)
        trained = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if self.clip is not None and trained:
            grads = [param.grad.to_local() for _, param in trained]
            torch._foreach_mul_(grads, self.clip.to(grads[0].dtype))
        arriving = [(group, param, self._to_host(param)) for group, param in trained]
        for group, param, (weight, grad, arrived) in arriving:
            if arrived is not None:
                arrived.synchronize()
            self._update(group, self.state[param], weight, grad, skipped)
            param.to_local().copy_(weight, non_blocking=True)

    def _to_host(self, param: DTensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        assert isinstance(param.grad, DTensor)
        stream = self._memory.stream
        pairs = zip((param, param.grad), self.copies[param], strict=True)
        weight, grad = (to_host(tensor.to_local(), host, stream) for tensor, host in pairs)
        return weight, grad, None if stream is None else stream.record_event()

    @staticmethod
    def _update(
        group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor, skipped: Tensor | None
    ) -> None:
        first, second = (state[name].to_local() for name in ADAMW_STATES)
        fused_adamw(
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


def _empty_state(param: DTensor) -> dict[str, Tensor]:
    local = param.to_local().detach()
    moments = {
        name: DTensor(torch.zeros_like(local, device="cpu"), param._spec, requires_grad=False) for name in ADAMW_STATES
    }
    return {"step": torch.zeros((), dtype=torch.float32), **moments}
