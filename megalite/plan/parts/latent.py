"""Latent attention, as plans know it. Its module is `megalite.model.latent`.

    q, k, v, o  features of all queries, keys, values and outputs of a token    t  tp
    h           width of the residual stream                                    T  tokens on a rank
    r           features of both latents and of the shared part of keys         w  bytes of an activation

A rank makes latents of its part of the sequence, by matrices of which all ranks of tp have copies. Only latents are
gathered, rwT bytes, unless queries are made of the token itself. Kept are queries, keys, values and output as in
grouped-query attention, and latents before and after their norms.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megalite.config.layers import Heads, Latent
from megalite.config.model_schema import BaseForm
from megalite.plan.parts import roles
from megalite.plan.parts.attention_memory import AttentionMemory
from megalite.plan.parts.context import ContextTraffic
from megalite.plan.parts.part import Kept, Moment, Passed, Pause, Product, Weight, Weighted
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.transfers import Transfers, over

_INPUTS = {  # inputs of matrices that tp gathers
    "q.weight": "the input of queries",
    "q_up.weight": "latents of queries",
    "k_up.weight": "latents of keys and values",
    "v_up.weight": "latents of keys and values",
}


@dataclass(frozen=True)
class LatentPart(Weighted):
    """The attention of a layer of the residual stream's `width`."""

    width: int
    kind: Latent
    base: BaseForm | None = None

    name = "attention"
    takes = "latents"
    moments = MappingProxyType(
        {
            **dict.fromkeys(("q_down", "kv_down", "k_shared"), takes),
            **dict.fromkeys(("q", "q_up"), "queries"),
            **dict.fromkeys(("k_up", "v_up"), "keys and values"),
            "o": "output",
        }
    )

    @property
    def heads(self) -> Heads:
        return self.kind.heads

    @property
    def latents(self) -> dict[str, int]:
        """Features of each latent, by the name of what is made of it."""
        queries = {} if self.kind.query_rank is None else {"q": self.kind.query_rank}
        return {**queries, "kv": self.kind.key_rank}

    def described(self) -> Iterator[tuple[str, Weight]]:
        heads, rank = self.heads, self.kind.key_rank
        for name, size in self.latents.items():
            yield f"{name}_down.weight", Weight((size, self.width), roles.LATENT)
            yield f"{name}_norm.weight", Weight((size,), roles.LATENT_NORM)
        yield "k_shared.weight", Weight((heads.rotary_width, self.width), roles.SHARED_KEY)
        if self.kind.query_rank is None:
            yield "q.weight", Weight((heads.queries, self.width), roles.QUERY)
        else:
            yield "q_up.weight", Weight((heads.queries, self.kind.query_rank), roles.QUERY_OF_LATENT)
        yield "k_up.weight", Weight((self._own_keys, rank), roles.KEY_OF_LATENT)
        yield "v_up.weight", Weight((heads.values, rank), roles.VALUE_OF_LATENT)
        yield "o.weight", Weight((self.width, heads.outputs), roles.ATTENTION_OUTPUT)

    @property
    def _own_keys(self) -> int:
        """Features of all keys of a token, but for the shared ones."""
        return self.heads.keys - self.heads.kv_count * self.heads.rotary_width

    def products(self, tokens: float, tp: int) -> list[Product]:
        heads, rank = self.heads, self.kind.key_rank
        down, queries = sum(self.latents.values()) + heads.rotary_width, self.latents.get("q", self.width)
        return [
            Product(tokens / tp, down, self.width),
            Product(tokens, heads.queries / tp, queries, gathered=queries),
            Product(tokens, (self._own_keys + heads.values) / tp, rank, gathered=rank + heads.rotary_width),
            Product(tokens, self.width, heads.outputs / tp, scattered=True),
        ]

    def passed(self, tp: int) -> Passed:
        return Passed(heads=(self.heads.queries + self.heads.keys + self.heads.values) / tp)

    def kept(self, sizes: Sizes) -> tuple[Kept, ...]:
        heads = self.heads
        found = [*self._memory(sizes).kept()]
        found.append(Kept("attention", heads.count * sizes.tokens * sizes.z // sizes.t, "attention"))
        for name, size in self.latents.items():
            moment = "queries" if name == "q" else "keys and values"
            found += [Kept("norms", sizes.split(size), moment), Kept("norms", sizes.statistic, moment)]
            found.append(Kept("attention", sizes.split(size), moment, for_weights=moment, cheap=True))
        return tuple(found)

    def forward(self, sizes: Sizes, passing: Sequence[Kept]) -> int:
        return sizes.gathered + sum(kept.bytes for kept in passing)

    def pauses(self, sizes: Sizes) -> tuple[Pause, ...]:
        return ()

    def backward(self, sizes: Sizes, own: int) -> tuple[Moment, ...]:
        gathered, heads, stream = sizes.gathered, self.heads, sizes.stream
        features = heads.queries, self._own_keys, heads.keys, heads.values, heads.outputs
        q, own_k, k, v, o = map(sizes.split, features)
        gradients = dict.fromkeys((*_INPUTS.values(), "o.weight", "down"), 0)  # by the input of a matrix
        for name, weight in self.weights():
            if weight.role.kind is not roles.RoleKind.NORM:
                key = _INPUTS.get(name, name if name in gradients else "down")
                gradients[key] += sizes.w * weight.gradient(sizes.t)
        output, of_keys = gradients["o.weight"], gradients[_INPUTS["k_up.weight"]]
        of_queries = gradients[_INPUTS["q.weight"]] + gradients[_INPUTS["q_up.weight"]]
        kv, of_kv = self._of_latent(sizes, self.kind.key_rank, of_keys)
        if self.kind.query_rank is None:
            of_q, again = sizes.linear(q, bool(of_queries)), gathered
        else:
            of_q, again = self._of_latent(sizes, self.kind.query_rank, of_queries)
        latents = sizes.split(sum(self.latents.values()) + heads.rotary_width)
        return (
            Moment(
                "output",
                max(own, gathered) + o,
                output,
                put_off=gathered or stream,
                of_stream=not (own or gathered),
            ),
            Moment("attention", o + self._memory(sizes).backward),
            Moment("rope", q * (2 + sizes.z // sizes.w) + own_k + k + v),
            Moment("keys and values", q + own_k + v + kv, of_keys, put_off=own_k + v, again=of_kv),
            Moment("queries", q + of_q, of_queries, put_off=q, again=again),
            Moment("latents", latents + stream, gradients["down"], put_off=latents),
        )

    def _of_latent(self, sizes: Sizes, rank: int, trained: int) -> tuple[int, int]:
        """Bytes in backward of layers that take a latent of `rank` features, beside gradients of what they make: of the
        latent's gradient, and of the latent itself where tp gathers it."""
        whole = sizes.tokens * sizes.w * rank
        gathered = whole if sizes.t > 1 else 0
        return whole + (gathered if trained else 0), gathered

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str) -> Transfers:
        found = ContextTraffic(sizes, self.heads, cp).forward(phase)
        for name, size in self._gathered(sizes).items():
            n = 1 if name == "shared keys" else sizes.in_pieces(size)
            found += over("tp", "all_gather", size // n, sizes.w, f"{phase}: gather of {name}", n)
        return found

    def output_transfers(self, sizes: Sizes, phase: str) -> Transfers:
        return sizes.over_tp("reduce_scatter", f"{phase}: scatter of the output of attention", sizes.pieces)

    def backward_transfers(self, sizes: Sizes, cp: int) -> Transfers:
        found = ContextTraffic(sizes, self.heads, cp).backward()
        found += sizes.over_tp("all_gather", "backward: gather of the output gradient of attention", sizes.pieces)
        for name, size in self._gathered(sizes).items():
            found += over("tp", "reduce_scatter", size, sizes.w, f"backward: scatter of the gradient of {name}")
        return found

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        trained = {_INPUTS.get(name) for name, weight in self.weights() if weight.trained}
        found: Transfers = Counter()
        for name, size in self._gathered(sizes).items():
            if name in trained:
                found += over("tp", "all_gather", size, sizes.w, f"weight gradients: gather of {name}")
        return found

    def _gathered(self, sizes: Sizes) -> dict[str, int]:
        """Bytes of what ranks of tp gather."""
        if sizes.t == 1:
            return {}
        found = {
            _INPUTS["q.weight"]: self.width,
            _INPUTS["k_up.weight"]: self.kind.key_rank,
            "shared keys": self.heads.rotary_width,
        }
        if self.kind.query_rank is not None:
            del found[_INPUTS["q.weight"]]
            found[_INPUTS["q_up.weight"]] = self.kind.query_rank
        return {name: sizes.tokens * sizes.w * size for name, size in found.items()}

    def _memory(self, sizes: Sizes) -> AttentionMemory:
        return AttentionMemory(sizes, self.heads, normed=False)
