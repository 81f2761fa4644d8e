"""Transfers of a part that tensor parallelism splits by columns, then by rows."""

from collections import Counter
from collections.abc import Sequence

from megalite.plan.parts.part import Kept, Weighted
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.transfers import Transfers


class Gathered(Weighted):
    """A part that gathers its input over tp and scatters its output (sequence parallelism, arXiv 2205.05198).

    Backward does the conjugates, and gathers the input again for the gradients of weights. title: of the part, in the
    purposes of transfers.
    """

    title: str

    @property
    def trains_columns(self) -> bool:
        """Flag: a matrix that takes the gathered input is trained, so its gradient needs that input."""
        found = (weight for _, weight in self.weights() if weight.trained and weight.role.kind is RoleKind.MATRIX)
        return any(not weight.role.into_stream for weight in found)

    def casts(self, sizes: Sizes, grads: int, inputs: int) -> tuple[int, int]:
        """Bytes in backward of casts to 8 bits: in layers that take the gathered input, and in that into the stream.

        grads: bytes of the gradients of the former's outputs. inputs: of the input of the latter. Gradients are in both
        layouts; gradients of an input that layers share are added up. An input whose rows have scales is in bf16 once
        more, while it is cast by columns.
        """
        whole = sizes.gathered or sizes.stream
        rowwise = sizes.config.train.float8_recipe == "rowwise"
        once_more = (whole // sizes.w, inputs) if rowwise else (0, 0)
        columns = into = 0
        if sizes.in_8_bits(self.weights(), into_stream=False):
            columns = 2 * sizes.narrow(grads, 0) + whole + once_more[0]
        if sizes.in_8_bits(self.weights(), into_stream=True):
            into = 2 * sizes.narrow(whole, 0) + sizes.narrow(inputs, 0) + once_more[1]
        return columns, into

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        return sizes.gathered + sum(kept.bytes for kept in passing)

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        return self._gather(sizes, f"{phase}: gather of the input of {self.title}", sizes.pieces)

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        return sizes.over_tp("reduce_scatter", f"{phase}: scatter of the output of {self.title}", sizes.pieces)

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        purpose = f"backward: gather of the output gradient of {self.title}"
        gathered = sizes.over_tp("all_gather", purpose, sizes.pieces)
        return gathered + sizes.over_tp("reduce_scatter", f"backward: scatter of the input gradient of {self.title}")

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        if not self.trains_columns:
            return Counter()
        return self._gather(sizes, f"weight gradients: gather of the input of {self.title}")

    def _gather(self, sizes: Sizes, purpose: str, n: int = 1) -> Transfers:
        """A gather of the input, in `n` pieces, or in 8 bits."""
        if sizes.in_8_bits(self.weights(), into_stream=False):
            return sizes.narrow_over_tp(purpose)
        return sizes.over_tp("all_gather", purpose, n)
