"""One rank's part of a model that computes forward only, over flat sequences of many texts' tokens.

s  tokens of a pass, padded so that tp divides them     d  model width
r  rows of it whose logits are wanted                   v  vocabulary
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.base.errors import InputError
from megalite.config.layers import Rotation, layer_kinds, rotations
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Config
from megalite.distributed.collectives import reduce_scatter, start_gather
from megalite.distributed.mesh import Mesh
from megalite.inference.cache import Cache, Next, Prompts
from megalite.inference.flat import Stem, attention_of, flat, longest, scored_rows
from megalite.model.decoder import Decoder
from megalite.model.positions import Angles, TokenPositions, angles, least_alike, tables
from megalite.plan.split import layers_of, split_of

MAX_LOGITS = 1 << 26  # logits of a rank at a time, where those of all tokens are wanted
ANGLE_POSITIONS = 4096  # positions whose angles are made at once; a model may name far more than its texts ever have


def check_layout(model: Model, layout: Layout) -> None:
    """Raises InputError if the model cannot be split so, or if its experts are not those that a router chooses."""
    for name in ("heads", "kv_heads", "ffn"):
        if (size := getattr(model, name)) % layout.tp:
            raise InputError(f"--tp {layout.tp}: must divide model.{name} = {size}")
    name, ranks = ("tp", layout.tp) if layout.ep == 1 else ("ep", layout.ep)
    if model.experts is None and layout.ep > 1:
        raise InputError(f"--ep {layout.ep}: the model has no experts; leave it out")
    if model.experts is not None and (count := model.experts.count) % ranks:
        raise InputError(f"--{name} {ranks}: must divide model.experts.count = {count}")
    if model.experts is not None and model.experts.force_balance:
        rule = "the model was trained for measuring speed: tokens took experts in turn, by their place in a batch"
        raise InputError(f"model.experts.force_balance = true: {rule}; train one without it")
    if layout.pp > model.layers:
        raise InputError(f"--pp {layout.pp}: the model has {model.layers} layers; use {model.layers} or fewer")


@dataclass(frozen=True)
class Pass:
    """A pass that was made: its activations `[s/t, 1, d]` on the last stage, None on others, and how many rows it has
    without padding."""

    engine: "Engine"
    x: Tensor | None
    positions: TokenPositions
    rows: int

    def logits(self, rows: Sequence[int] | None = None) -> Tensor | None:
        """Logits `[r, v/t]` of these rows, or of all, on the last stage."""
        if self.x is None:
            return None
        if rows is None:
            return self.engine.decoder.answer(self.x)[: self.rows, 0]
        return self.engine._logits(self.x, rows)

    def further(self, tokens: Sequence[int], rows: Sequence[int]) -> Tensor | None:
        """Logits `[r, v/t]` of the token after the next at these rows, on the last stage.

        tokens: of every row, the one after it. The first layer of multi-token prediction predicts what follows.
        """
        if self.x is None:
            return None
        engine = self.engine
        x = engine.decoder.further(self.x, engine._padded(tokens), self.positions)
        return engine.decoder.further_logits(engine._rows(x, rows))[: len(rows), 0]


class Engine:
    """The stage of this rank, with weights that are still to be filled. Its methods are collective over pp and tp.

    Replicas of the model that share out its experts make every pass at the same time, within `together`.
    """

    def __init__(self, model: Model, mesh: Mesh, dtype: torch.dtype) -> None:
        self.model, self.mesh, self.dtype = model, mesh, dtype
        layout, self.stage = mesh.layout, mesh.coordinates["pp"]
        self.last = self.stage == layout.pp - 1
        self.layers = layers_of(split_of(Config(model=model, parallel=Parallel(pp=layout.pp))))[self.stage]
        experts = None if mesh.experts is None else mesh.experts["ep"]
        self.decoder = Decoder(model, mesh.tp, self.layers, self.stage == 0, self.last, ep=experts)
        self.sharing = None if experts is None else experts.get_group()  # with ranks of other replicas
        self.decoder.to(dtype).to_empty(device=mesh.device).requires_grad_(False)
        self.kinds = {kind.attention.heads.scores for kind in layer_kinds(model)}
        self.rotations = rotations(model)
        self._reach, self._tables = ANGLE_POSITIONS, self._up_to(ANGLE_POSITIONS)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make passes here; after them, join those of replicas that have more. Collective over these."""
        try:
            yield
        except InputError:  # an error in a text that others do not have
            self._join()
            raise
        self._join()

    @torch.inference_mode()
    def _join(self) -> None:
        """Make passes of a token that nobody asked for, until no replica has any to make."""
        while self.sharing is not None and self._to_make(0):
            self._pass(*self._whole_texts([Stem([0])]))

    def _to_make(self, passes: int) -> Tensor:
        """The passes that replicas which share experts make now, of which this one makes 1 or 0."""
        count = torch.tensor(passes, device=self.mesh.device)
        dist.all_reduce(count, group=self.sharing)
        return count

    def cache(self, slots: int, capacity: int) -> Cache:
        """An empty cache. Raises InputError if there is no memory for it."""
        heads = layer_kinds(self.model)[0].attention.heads
        local = replace(heads, kv_count=heads.kv_count // self.mesh.layout.tp)
        return Cache(self.layers, slots, capacity, local, self.dtype, self.mesh.device)

    def prompts(
        self,
        texts: Sequence[Sequence[int]],
        cache: Cache | None = None,
        slots: Sequence[int] = (),
        wanted: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Logits `[r, v/t]` of one pass of whole texts, from their beginnings, on the last stage.

        wanted: rows of the texts laid end to end; None: all. Others: as for `prompts_pass`.
        """
        return self.prompts_pass(texts, cache, slots, lengths).logits(wanted)

    def prompts_pass(
        self,
        texts: Sequence[Sequence[int]],
        cache: Cache | None = None,
        slots: Sequence[int] = (),
        lengths: Sequence[int] | None = None,
    ) -> "Pass":
        """A pass of whole texts, from their beginnings.

        cache, slots: where every text goes, if it will be continued. lengths: how many tokens of every text will be
        read in the end, on which the angles of some models depend; None: as many as fit into the cache, or as there
        are.
        """
        rows = None
        if cache is not None:
            rows = self._there([slot for slot, text in zip(slots, texts, strict=True) for _ in text])
            lengths = lengths or [cache.capacity] * len(texts)
            for slot, length in zip(slots, lengths, strict=True):
                cache.lengths[slot] = length
        tokens, positions = self._whole_texts([Stem(text) for text in texts], cache, rows, lengths)
        return Pass(self, self._activations(tokens, positions), positions, sum(map(len, texts)))

    def next(self, tokens: Sequence[int], at: Sequence[int], cache: Cache) -> Tensor | None:
        """Logits `[n, v/t]` of one more token of each of the first n slots of `cache`, at these positions."""
        return self.next_pass(tokens, at, cache).logits()

    def next_pass(self, tokens: Sequence[int], at: Sequence[int], cache: Cache, each: int = 1) -> "Pass":
        """A pass of `each` more tokens of the first n slots of `cache`, slot by slot, from these positions on."""
        at = [place + number for place in at for number in range(each)]
        index, padded = self._there(at), self._padded(tokens)
        angles, rows = self._angles_of(
            [range(place, place + each) for place in at[::each]], cache.lengths[: len(at) // each]
        )
        if rows is None:  # a token that is tried may lie beyond the last position
            rows = index.clamp(max=self.model.sequence_length - 1)
        slots = torch.arange(len(at) // each, device=self.mesh.device).repeat_interleave(each)
        places = self._places(rows, len(padded))
        positions = Next(angles, {}, places, cache, tuple(at), index, slots, each)
        return Pass(self, self._activations(padded, positions), positions, len(at))

    def scores(self, passes: Iterable[Sequence[Stem]]) -> Tensor:
        """The log-probability of every token of every branch, and whether it is the likeliest: `[tokens, 2]`, float64.

        The stages of a pipeline work on several passes at a time.
        """
        found, count = [torch.empty(0, 2, dtype=torch.float64, device=self.mesh.device)], 0
        for stems in passes:
            tokens, positions = self._whole_texts(stems)
            x = self._activations(tokens, positions)
            rows, targets = scored_rows(stems)
            count += len(rows)
            step = max(1, MAX_LOGITS * self.mesh.layout.tp // self.model.vocab_size)
            for start in range(0, len(rows), step) if x is not None else ():
                assert x is not None
                logits = self._logits(x, rows[start : start + step])
                found.append(self._measured(logits, targets[start : start + step]))
        told = torch.cat(found) if self.last else torch.empty(count, 2, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.layout.pp > 1:
            dist.broadcast(told, group=self.mesh.group("pp"), group_src=self.mesh.layout.pp - 1)
        return told

    def whole(self, logits: Tensor) -> Tensor:
        """Logits `[r, v]` from the parts of all tensor-parallel ranks, without padding."""
        group = self.decoder.group
        if group.size() == 1:
            return logits
        return start_gather(logits.t().contiguous(), group).wait()[: self.model.vocab_size].t().contiguous()

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

    def _angles_up_to(self, length: int) -> dict[Rotation, Angles]:
        """Tables of angles for texts of `length` tokens, as they are in short texts."""
        if length > self._reach:
            self._reach, self._tables = 2 * length, self._up_to(2 * length)
        return self._tables

    def _up_to(self, length: int) -> dict[Rotation, Angles]:
        positions = torch.arange(min(length, self.model.sequence_length), device=self.mesh.device)
        return tables(self.model, positions, self.dtype, 0)

    def _least_alike(self, length: int) -> tuple[int, ...]:
        """By rotation: the length of the shortest texts that have the same angles as those of `length` tokens."""
        return tuple(least_alike(rotation.rope.scaling, length) for rotation in self.rotations)

    def alike(self, stem: Stem) -> list[Stem]:
        """The stem, divided where the lengths of its texts give their beginning different angles."""
        lengths = {len(stem.tokens) + len(branch) - 1 for branch in stem.branches}
        if len({self._least_alike(length) for length in lengths}) <= 1:
            return [stem]
        return [Stem(stem.tokens, [branch]) for branch in stem.branches]

    def _angles_of(self, runs: Sequence[range], lengths: Sequence[int]) -> tuple[dict[Rotation, Angles], Tensor | None]:
        """Tables of angles, and the row of each position of `runs` in them; None if position n is in row n. lengths:
        length of the text of each run."""
        found = [self._least_alike(length) for length in lengths]
        if not any(map(any, found)):
            return self._angles_up_to(max(run.stop for run in runs)), None
        order = sorted(range(len(runs)), key=found.__getitem__)  # equal ones become neighbours
        made = []
        for alike, numbers in groupby(order, found.__getitem__):
            places = self._there([place for number in numbers for place in runs[number]])
            each = zip(self.rotations, alike, strict=True)
            made.append([angles(rotation, places, self.dtype, length) for rotation, length in each])
        starts = dict(zip(order, accumulate((len(runs[number]) for number in order), initial=0), strict=False))
        rows = [starts[number] + offset for number, run in enumerate(runs) for offset in range(len(run))]
        joined = dict[Rotation, Angles]()
        for rotation, parts in zip(self.rotations, zip(*made, strict=True), strict=True):
            cos, sin = map(torch.cat, zip(*parts, strict=True))
            joined[rotation] = cos, sin
        return joined, self._there(rows)

    def _padded(self, tokens: Sequence[int]) -> Tensor:
        padded = [*tokens, *[0] * (-len(tokens) % self.mesh.layout.tp)]
        return self._there(padded)[:, None]  # s 1

    def _there(self, numbers: Sequence[int]) -> Tensor:
        """Numbers on the device, for which the host does not wait."""
        here = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.mesh.device.type == "cuda")
        return here.to(self.mesh.device, non_blocking=True)

    def _places(self, at: Tensor, length: int) -> Tensor:
        """Pad `at`, rows of the tables of angles, with zeros to `length`: `[length, 1]`."""
        return torch.nn.functional.pad(at, (0, length - len(at)))[:, None]

    def _whole_texts(
        self,
        stems: Sequence[Stem],
        cache: Cache | None = None,
        slots: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, TokenPositions]:
        """Tokens and positions of one pass of whole texts. lengths: of the texts; None: those that they have."""
        texts = flat(stems)
        device = self.mesh.device
        tokens = self._padded([token for text in texts for token in text.tokens])
        at = self._there([place for text in texts for place in range(text.at, text.end)])
        attends = {kind: attention_of(texts, len(tokens), kind, device) for kind in self.kinds}
        angles, rows = self._angles_of([range(text.at, text.end) for text in texts], lengths or longest(texts))
        places = self._places(at if rows is None else rows, len(tokens))
        return tokens, Prompts(angles, attends, places, cache, slots, at)

    def _activations(self, x: Tensor, positions: TokenPositions) -> Tensor | None:
        """Outputs `[s/t, 1, d]` of the model's last layer for tokens `[s, 1]`, on the last stage; None on others."""
        if self.sharing is not None:
            self._to_make(1)
        return self._pass(x, positions)

    def _pass(self, x: Tensor, positions: TokenPositions) -> Tensor | None:
        layout, group = self.mesh.layout, self.mesh.group("pp")
        if self.stage > 0:
            x = torch.empty(len(x) // layout.tp, 1, self.model.width, dtype=self.dtype, device=self.mesh.device)
            dist.recv(x, group=group, group_src=self.stage - 1)
        x = self.decoder.activations(x, positions)
        if self.last:
            return x
        dist.send(x.contiguous(), group=group, group_dst=self.stage + 1)
        return None

    def _logits(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits `[r, v/t]` of these rows of x `[s/t, 1, d]`."""
        return self.decoder.answer(self._rows(x, rows))[: len(rows), 0]

    def _measured(self, logits: Tensor, targets: Sequence[int]) -> Tensor:
        """The log-probability of a token in every row, and whether it is the likeliest: `[r, 2]`."""
        group, wide = self.decoder.group, logits.to(torch.promote_types(logits.dtype, torch.float32))
        first = group.rank() * wide.shape[1]
        wide[:, max(self.model.vocab_size - first, 0) :] = -torch.inf  # padding
        wanted = self._there(targets)
        absent = (wanted < first) | (wanted >= first + wide.shape[1])
        place = (wanted - first).masked_fill(absent, 0)
        score = wide.gather(1, place[:, None])[:, 0].masked_fill(absent, 0)
        largest, index = wide.max(-1)
        mine = torch.stack((wide.logsumexp(-1).double(), score.double(), largest.double(), (index + first).double()))
        sums, scores, tops, indices = start_gather(mine[None], group).wait().unbind(1)  # each t r
        likeliest = indices.gather(0, tops.argmax(0, keepdim=True))[0]
        return torch.stack((scores.sum(0) - sums.logsumexp(0), (likeliest == wanted).double()), dim=1)

    def _rows(self, x: Tensor, wanted: Sequence[int]) -> Tensor:
        """Return this rank's part `[r/t, 1, d]` of the wanted rows, padded, of x `[s/t, 1, d]`."""
        rows, group = self._padded(wanted)[:, 0], self.decoder.group
        if group.size() == 1:
            return x[rows]
        here = rows - group.rank() * len(x)
        absent = (here < 0) | (here >= len(x))
        found = x[here.masked_fill(absent, 0)].masked_fill(absent[:, None, None], 0)
        return reduce_scatter(found, group)
