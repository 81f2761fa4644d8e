"""One rank's part of a model that computes forward only, over flat sequences of many texts' tokens.

s  tokens of a pass, padded so that tp divides them     d  model width
r  rows of it whose logits are wanted                   v  vocabulary
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.errors import InputError
from megalite.config.layers import layer_kinds
from megalite.config.layout import Layout
from megalite.config.schema import Config, Model, Parallel
from megalite.dist.collectives import reduce_scatter, start_gather
from megalite.dist.mesh import Mesh
from megalite.inference.cache import Cache, Next, Prompts
from megalite.model.decoder import Decoder
from megalite.model.positions import TokenPositions, angles
from megalite.parallel.context import attention
from megalite.plan.split import layers_of, split_of

MOST_ANGLES = 4096  # positions whose angles are made at once; a model may name far more than its texts ever have


def check_layout(model: Model, layout: Layout) -> None:
    """Raises InputError if the model cannot be split so."""
    for name in ("heads", "kv_heads", "ffn", "vocab_size"):
        if (size := getattr(model, name)) % layout.tp:
            raise InputError(f"--tp {layout.tp}: must divide model.{name} = {size}")
    if layout.pp > model.layers:
        raise InputError(f"--pp {layout.pp}: the model has {model.layers} layers; use {model.layers} or fewer")


class Engine:
    """The stage of this rank, with weights that are still to be filled. Its methods are collective over pp and tp."""

    def __init__(self, model: Model, mesh: Mesh, dtype: torch.dtype) -> None:
        self.model, self.mesh, self.dtype = model, mesh, dtype
        layout, self.stage = mesh.layout, mesh.coordinates["pp"]
        self.last = self.stage == layout.pp - 1
        self.layers = layers_of(split_of(Config(model=model, parallel=Parallel(pp=layout.pp))))[self.stage]
        self.decoder = Decoder(model, mesh.tp, self.layers, self.stage == 0, self.last)
        self.decoder.to(dtype).to_empty(device=mesh.device).requires_grad_(False)
        self.kinds = {kind.attention for kind in layer_kinds(model)}
        self._angles = self._table(MOST_ANGLES)

    def cache(self, slots: int, capacity: int) -> Cache:
        """An empty cache. Raises InputError if there is no memory for it."""
        heads = self.model.kv_heads // self.mesh.layout.tp
        return Cache(self.layers, slots, capacity, heads, self.model.head_size, self.dtype, self.mesh.device)

    def prompts(
        self,
        texts: Sequence[Sequence[int]],
        cache: Cache | None = None,
        slots: Sequence[int] = (),
        wanted: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Logits `[r, v/t]` of one pass of whole texts, from their beginnings, on the last stage.

        cache, slots: where every text goes, if it will be continued. wanted: rows of the texts laid end to end; None:
        all.
        """
        ends = list(accumulate(map(len, texts)))
        count, device = ends[-1], self.mesh.device
        tokens = self._padded([token for text in texts for token in text])
        at = torch.tensor([position for text in texts for position in range(len(text))], device=device)
        bounds = [0, *ends] if len(tokens) == count else [0, *ends, len(tokens)]
        documents = [tuple(bounds)] if len(bounds) > 2 else None
        attends = {kind: attention("ring", None, len(tokens), device, documents, kind) for kind in self.kinds}
        rows = None
        if cache is not None:
            rows = torch.tensor([slot for slot, text in zip(slots, texts, strict=True) for _ in text], device=device)
        angles = self._angles_up_to(max(map(len, texts)))
        positions = Prompts(*angles, attends, self._places(at, len(tokens)), cache, rows, at)
        return self._run(tokens, positions, count, wanted)

    def next(self, tokens: Sequence[int], at: Sequence[int], cache: Cache) -> Tensor | None:
        """Logits `[n, v/t]` of one more token of each of the first n slots of `cache`, at these positions."""
        device = self.mesh.device
        index = torch.tensor(at, device=device)
        padded = self._padded(tokens)
        places = self._places(index, len(padded))
        slots = torch.arange(len(at), device=device)
        positions = Next(*self._angles_up_to(max(at) + 1), {}, places, cache, tuple(at), index, slots)
        return self._run(padded, positions, len(at), None)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits `[r, v]` from the parts of all tensor-parallel ranks."""
        group = self.decoder.group
        return logits if group.size() == 1 else start_gather(logits.t().contiguous(), group).wait().t().contiguous()

    def agree(self, count: int, make: Callable[[Tensor], Tensor], logits: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`count` numbers that `make` makes of whole logits, on one rank of the last stage; told to all."""
        found = torch.empty(count, dtype=dtype, device=self.mesh.device)
        if logits is not None:
            whole = self.whole(logits)
            if self.decoder.group.rank() == 0:
                found.copy_(make(whole))
            if self.decoder.group.size() > 1:
                dist.broadcast(found, group=self.decoder.group, group_src=0)
        if self.mesh.layout.pp > 1:
            dist.broadcast(found, group=self.mesh.group("pp"), group_src=self.mesh.layout.pp - 1)
        return found

    def _angles_up_to(self, length: int) -> tuple[Tensor, Tensor]:
        """Tables of angles for texts of `length` tokens."""
        if length > len(self._angles[0]):
            self._angles = self._table(2 * length)
        return self._angles

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(min(length, self.model.sequence_length), device=self.mesh.device)
        return angles(self.model, positions, self.dtype)

    def _padded(self, tokens: Sequence[int]) -> Tensor:
        padded = [*tokens, *[0] * (-len(tokens) % self.mesh.layout.tp)]
        return torch.tensor(padded, device=self.mesh.device)[:, None]  # s 1

    def _places(self, at: Tensor, length: int) -> Tensor:
        """Rows of the angles' tables, `[s, 1]`."""
        return torch.nn.functional.pad(at, (0, length - len(at)))[:, None]

    def _run(self, x: Tensor, positions: TokenPositions, count: int, wanted: Sequence[int] | None) -> Tensor | None:
        layout, group = self.mesh.layout, self.mesh.group("pp")
        if self.stage > 0:
            x = torch.empty(len(x) // layout.tp, 1, self.model.width, dtype=self.dtype, device=self.mesh.device)
            dist.recv(x, group=group, group_src=self.stage - 1)
        x = self.decoder.activations(x, positions)  # s/t 1 d
        if not self.last:
            dist.send(x.contiguous(), group=group, group_dst=self.stage + 1)
            return None
        if wanted is not None:
            x, count = self._rows(x, wanted), len(wanted)
        return self.decoder.answer(x)[:count, 0]

    def _rows(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """This rank's part `[r/t, 1, d]` of the wanted rows, padded, of x `[s/t, 1, d]`."""
        rows, group = self._padded(wanted)[:, 0], self.decoder.group
        if group.size() == 1:
            return x[rows]
        here = rows - group.rank() * len(x)
        absent = (here < 0) | (here >= len(x))
        found = x[here.masked_fill(absent, 0)].masked_fill(absent[:, None, None], 0)
        return reduce_scatter(found, group)
