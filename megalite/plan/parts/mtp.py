"""Beginning and end of a layer of multi-token prediction, as plans know them; its module is `megalite.model.mtp`.

A layer takes the stream of the layer before, which predicts a token, and the embedding of that token. A matrix makes
one stream of the norms of both, each rank of tp for its part of the sequence. The layer's output has a norm, after
which the head takes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.plan.parts import roles
from megalite.plan.parts.part import Kept, Moment, Passed, Product, Weight
from megalite.plan.parts.sizes import Sizes


@dataclass(frozen=True)
class MtpPart:
    """Both in a residual stream of `width` features."""

    width: int

    name = "mtp"
    heads = None
    takes = "mtp projection"  # the moment of backward that makes the gradient of the matrix

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """All weights, each with its name inside of the part."""
        for name in ("embedding_norm", "stream_norm"):
            yield f"{name}.weight", Weight((self.width,), roles.NORM)
        yield "projection.weight", Weight((self.width, 2 * self.width), roles.MTP_PROJECTION)
        yield "output_norm.weight", Weight((self.width,), roles.NORM)

    def products(self, tokens: float, tp: int) -> list[Product]:
        """The matrix product of a forward pass on one of `tp` ranks."""
        return [Product(tokens / tp, self.width, 2 * self.width)]

    def passed(self, tp: int) -> Passed:
        """Elements that other kernels pass on between products; norms and the sum are counted for every layer."""
        return Passed(hidden=2 * self.width / tp)

    def kept(self, sizes: Sizes) -> list[Kept]:
        """Inputs of norms and of the product."""
        given = [Kept("norms", sizes.stream, norm, given=True) for norm in ("stream norm", "embedding norm")]
        statistics = [Kept("norms", sizes.statistic, norm) for norm in ("output norm", "stream norm", "embedding norm")]
        inputs = Kept(self.name, 2 * sizes.stream, self.takes, self.takes)
        return [*given, *statistics, inputs, Kept("norms", sizes.stream, "output norm")]

    def first_moments(self, sizes: Sizes) -> list[Moment]:
        """The moments of backward before those of attention and feed-forward."""
        return [Moment("output norm", sizes.norm - 2 * sizes.stream)]

    def last_moments(self, sizes: Sizes) -> list[Moment]:
        """The moments of backward after those of attention and feed-forward."""
        (_, weight), stream = next(each for each in self.weights() if each[0].startswith("projection")), sizes.stream
        made = sizes.w * weight.gradient(sizes.t)
        return [
            Moment(self.takes, 2 * stream, made, put_off=stream),
            Moment("stream norm", sizes.norm),
            Moment("embedding norm", sizes.norm),
        ]
