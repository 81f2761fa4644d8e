"""Tokens that chose each expert in a step, and what follows from it: a correction of the choice."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.config.layers import layer_kinds
from megalite.config.model_schema import Model
from megalite.model.decoder import Decoder
from megalite.model.experts import Experts


class ExpertLoad:
    """The loads of all layers with experts; this rank has the routers of those in `stages`.

    layers: their numbers in the whole model. count: experts of each.
    """

    def __init__(self, stages: Iterable[Decoder], model: Model) -> None:
        self.layers = [number for number, kind in enumerate(layer_kinds(model)) if kind.mixture is not None]
        self.count = 0 if model.experts is None else model.experts.count
        self._routers = {
            self.layers.index(int(name)): layer.mlp.router
            for stage in stages
            for name, layer in stage.layers.items()
            if isinstance(layer.mlp, Experts)
        }
        trains = model.adapter is None  # else routers stay as they are, and corrections with them
        self._corrects = trains and model.experts is not None and model.experts.correction_rate is not None

    def begin(self) -> None:
        """Begin a step: what was counted before is forgotten."""
        for router in self._routers.values():
            router.load = None

    def counted(self, device: torch.device) -> Tensor:
        """Tokens of this rank that have chosen each expert of each layer, `[layers · E]`, in float64.

        Sums of them over all ranks are whole numbers below 2⁵³, so they are exact.
        """
        found = torch.zeros(len(self.layers), self.count, dtype=torch.float64, device=device)
        for row, router in self._routers.items():
            if router.load is not None:
                found[row] = router.load
        return found.flatten()

    def correct(self, load: Tensor, bad: Tensor) -> None:
        """Correct the choices of this rank's routers.

        load: what all ranks have `counted`. bad: 1 for a step that is not taken.
        """
        if self._corrects:
            whole = load.view(len(self.layers), -1).long()
            for row, router in self._routers.items():
                router.correct(whole[row], 1 - bad)
