"""AdamW whose states live in host memory and whose update runs there (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

Every step, of a rank's shard, gradients and weights are copied to the host and the new weights back: 12 bytes per
parameter. Between steps weights are on the device alone, so whatever else changes them, such as loading a
checkpoint, need not tell the optimizer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite.parallel.offload import to_host
from megalite_kernels import fused_adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW(fused=True)` on a CPU, for DTensors on any device.

    `state` is there from the beginning: moments are DTensors placed as their parameter, with parts in host memory.
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
        self.found_inf: Tensor | None = None  # as of torch's fused optimizers: a float32 1 skips the update
        self._stream: torch.cuda.Stream | None = None
        for group in self.param_groups:
            for param in group["params"]:
                if param.is_cuda and self._stream is None:
                    self._stream = torch.cuda.Stream(param.device)
                if not param.is_meta:  # what has no data yet is not trained
                    self.state[param] = _empty_state(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. All copies to the host are under way before the first update."""
        skipped = None if self.found_inf is None else to_host(self.found_inf, self._stream)
        arriving = [
            (group, param, self._to_host(param))
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for group, param, (weight, grad, arrived) in arriving:
            if arrived is not None:
                arrived.synchronize()
            self._update(group, self.state[param], weight, grad, skipped)
            param.to_local().copy_(weight, non_blocking=True)

    def _to_host(self, param: DTensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        assert isinstance(param.grad, DTensor)
        weight, grad = (to_host(tensor.to_local(), self._stream) for tensor in (param, param.grad))
        return weight, grad, None if self._stream is None else self._stream.record_event()

    @staticmethod
    def _update(
        group: dict[str, Any], state: dict[str, Any], weight: Tensor, grad: Tensor, skipped: Tensor | None
    ) -> None:
        first, second = (state[name].to_local() for name in MOMENTS)
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
        name: DTensor(torch.zeros_like(local, device="cpu"), param._spec, requires_grad=False) for name in MOMENTS
    }
    return {"step": torch.zeros((), dtype=torch.float32), **moments}
