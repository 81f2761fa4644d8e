"""A layer made of its parts: attention, then a feed-forward, each with norms around it and added to the stream."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megalite.config.layers import GroupedQuery, LayerKind, Mixture, SwiGLU
from megalite.config.model_schema import BaseForm
from megalite.plan.parts import roles
from megalite.plan.parts.adapted import Adapted
from megalite.plan.parts.attention import GroupedQueryPart
from megalite.plan.parts.experts import ExpertsPart
from megalite.plan.parts.latent import LatentPart
from megalite.plan.parts.mtp import MtpPart
from megalite.plan.parts.part import Kept, Moment, Part, Product, Weight
from megalite.plan.parts.roles import RoleKind
from megalite.plan.parts.sizes import Sizes
from megalite.plan.parts.swiglu import SwiGLUPart
from megalite.plan.parts.transfers import Transfers


def attention(width: int, kind: LayerKind) -> GroupedQueryPart | LatentPart:
    """The attention of a layer of `kind` in a residual stream of `width` features."""
    if isinstance(kind.attention, GroupedQuery):
        return GroupedQueryPart(width, kind.attention, kind.base, rotary=kind.rope is not None)
    return LatentPart(width, kind.attention, kind.base)


def feed_forward(width: int, kind: SwiGLU | Mixture, base: BaseForm | None = None) -> SwiGLUPart | ExpertsPart:
    """The feed-forward of a layer of the residual stream's `width`. base: as `LayerKind.base`."""
    return SwiGLUPart(width, kind, base) if isinstance(kind, SwiGLU) else ExpertsPart(width, kind, base)


@dataclass(frozen=True)
class Layer:
    """A layer of `kind` in a residual stream of `width` features."""

    width: int
    kind: LayerKind

    @cached_property
    def parts(self) -> tuple[Part, Part]:
        """Attention and feed-forward."""
        kind = self.kind
        parts = attention(self.width, kind), feed_forward(self.width, kind.feed_forward, kind.base)
        if kind.adapter is None:
            return parts
        return Adapted(parts[0], kind.adapter), Adapted(parts[1], kind.adapter)

    @cached_property
    def mtp(self) -> MtpPart | None:
        """The beginning and the end of a layer of multi-token prediction; None: it is none."""
        return MtpPart(self.width) if self.kind.mtp else None

    @property
    def computed(self) -> tuple[Part | MtpPart, ...]:
        """All parts that have matrix products."""
        return self.parts if self.mtp is None else (self.mtp, *self.parts)

    @property
    def frozen(self) -> bool:
        """Flag: only adapters are trained."""
        return self.kind.adapter is not None

    def norms(self, part: Part) -> tuple[str | None, str | None]:
        """The names of the norms before and after a part; None: there is none."""
        before, after = ("before" in self.kind.norms, "after" in self.kind.norms)
        only = f"{part.name}_norm"
        return only if before else None, (f"{part.name}_output_norm" if before else only) if after else None

    def _moments(self, part: Part) -> tuple[str, str]:
        """The moments of these norms in backward; "": there is none."""
        before, after = (norm.replace("_", " ") if norm else "" for norm in self.norms(part))
        return before, after

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """All weights, each with its name inside of the layer."""
        if self.mtp is not None:
            yield from ((f"{self.mtp.name}.{name}", weight) for name, weight in self.mtp.weights())
        for part in self.parts:
            for norm in filter(None, self.norms(part)):
                yield f"{norm}.weight", Weight((self.width,), roles.NORM, not self.frozen)
            for name, weight in part.weights():
                yield f"{part.name}.{name}", weight

    def exchanged(self, ep: int) -> tuple[list[Weight], list[Weight]]:
        """The weights of the two groups that FSDP2 exchanges at once: experts that `ep` ranks share out, and all else.

        With one rank, experts are with all else. State is on every rank.
        """
        every = [weight for _, weight in self.weights() if weight.role.kind is not RoleKind.STATE]
        if ep == 1:
            return [], every
        return [weight for weight in every if weight.role.of_expert], [
            weight for weight in every if not weight.role.of_expert
        ]

    def products(self, tokens: float, tp: int) -> list[Product]:
        """The matrix products of a forward pass on one of `tp` ranks."""
        return [product for part in self.computed for product in part.products(tokens, tp)]

    def kept(self, sizes: Sizes, with_input: bool = False) -> tuple[Kept, ...]:
        """The tensors that a layer without recompute keeps for backward. with_input: its input, even if not needed."""
        return tuple(self._needed(self._made(sizes, with_input), self._moments_of_weights(sizes), with_input))

    def dropped(self, sizes: Sizes) -> list[Kept]:
        """Tensors that forward makes, and does not keep, as weights whose gradients need them are not trained."""
        trained = self._moments_of_weights(sizes)
        alone = (kept for kept in self._made(sizes) if kept.until == kept.for_weights and not kept.recipe)
        return [kept for kept in alone if kept.for_weights not in trained]

    def _moments_of_weights(self, sizes: Sizes) -> set[str]:
        """The moments that make gradients of matrices."""
        return {moment.name for moment in self.backward(sizes) if moment.put_off}

    def _made(self, sizes: Sizes, with_input: bool = False) -> list[Kept]:
        """The tensors of a forward pass that backward needs if all weights are trained."""
        found = list[Kept]() if self.mtp is None else self.mtp.kept(sizes)
        for part in self.parts:
            first, (before, after) = part is self.parts[0] and self.mtp is None, self._moments(part)
            given = first and not before
            if isinstance(part, Adapted) and part.drops and not given:
                pass  # factors keep inputs of their own
            elif not sizes.in_8_bits(part.weights(), into_stream=False):
                found.append(Kept(part.name, sizes.stream, part.takes, part.takes, bool(before), given))
            else:
                narrow = sizes.narrow(sizes.stream, sizes.tokens // sizes.t)
                found.append(Kept(part.name, narrow, part.takes, part.takes))
                if given and with_input:
                    found.append(Kept(part.name, sizes.stream, part.takes, given=True))
            for norm, given in ((before, first), (after, False)):
                if norm:
                    found.append(Kept("norms", sizes.stream, norm, given=given))
                    found.append(Kept("norms", sizes.statistic, norm))
            found += part.kept(sizes)
        return found

    def _needed(self, found: Iterable[Kept], made: Container[str], with_input: bool) -> Iterator[Kept]:
        """The tensors without those that only gradients of weights need which are not trained.

        made: the moments that make gradients of matrices.
        """
        for kept in found:
            if not kept.for_weights or kept.for_weights in made:
                yield kept
            elif kept.until != kept.for_weights or (with_input and kept.given):
                yield replace(kept, for_weights="")

    def backward(self, sizes: Sizes) -> tuple[Moment, ...]:
        """The moments of backward, in order. The gradient of the residual stream is held in all of them."""
        found = list[Moment]() if self.mtp is None else self.mtp.first_moments(sizes)
        for part in reversed(self.parts):
            before, after = self._moments(part)
            if after:
                found.append(Moment(after, sizes.norm - sizes.stream))
            found += part.backward(sizes, own=sizes.stream if after else 0)
            if before:  # its gradient is beside that of the stream
                found.append(Moment(before, sizes.norm))
            found[-1] = replace(found[-1], adds=True)
        if self.mtp is not None:
            found += self.mtp.last_moments(sizes)
        # Gradients of all streams that the head takes are one tensor, which is held until the first stream's is used.
        held = sizes.stream * (1 if self.mtp is None else 1 + sizes.predicted)
        return tuple(
            replace(
                moment,
                temporaries=held + moment.temporaries,
                put_off=moment.put_off if moment.weights else 0,  # 0 where no weight is trained
            )
            for moment in found
        )

    def forward_transfers(self, sizes: Sizes, cp: int, phase: str = "forward") -> Transfers:
        """Transfers of a forward pass. cp: the rank's place in its group of context parallelism."""
        found: Transfers = Counter()
        for part in self.parts:
            found += part.forward_transfers(sizes, cp, phase) + part.output_transfers(sizes, phase)
        return found

    def backward_transfers(self, sizes: Sizes, cp: int, again: bool, split: bool) -> Transfers:
        """Transfers of backward. again: it runs the whole layer again; split: gradients of weights are put off."""
        found: Transfers = Counter()
        if again:
            found += self.forward_transfers(sizes, cp, "recompute")
            last = self.parts[-1]
            needed = isinstance(last, Adapted) and last.scales_output and self.kind.mixture is None
            needed = needed or "after" in self.kind.norms or self.mtp is not None
            if not needed:  # nothing that backward needs is made of the last output
                found -= last.output_transfers(sizes, "recompute")
        for part in self.parts:
            found += part.backward_transfers(sizes, cp)
        return found if split else found + self.weight_transfers(sizes)

    def weight_transfers(self, sizes: Sizes) -> Transfers:
        """Transfers for the gradients of weights, in backward or in W."""
        return sum((part.weight_transfers(sizes) for part in self.parts), start=Counter())
