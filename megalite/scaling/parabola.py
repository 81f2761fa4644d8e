"""Vertices of parabolas through losses, for many weightings of the points at once."""

from dataclasses import dataclass

import numpy as np

from megalite.scaling.forms import Array

MIN_PLACES = 3  # different places that a parabola needs
MIN_CURVATURE = 1e-9  # curvature over the range, as a share of the largest value: below that there is no vertex
PLACE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Parabola:
    """g parabolas lowest + curvature · (x - vertex)². inside: whether a minimum lies between the outermost points."""

    vertex: Array
    lowest: Array
    curvature: Array
    inside: np.ndarray

    def at(self, x: Array) -> Array:
        """Values of the first parabola at x."""
        told: Array = self.lowest[0] + self.curvature[0] * (x - self.vertex[0]) ** 2
        return told


def parabola(x: Array, y: Array, weights: Array | None = None) -> Parabola:
    """Least squares through points x `[n]` and y `[n]` or `[g, n]`, by weights `[g, n]`; without, all count once."""
    weights = np.ones((1, len(x))) if weights is None else weights
    y = np.broadcast_to(np.where(weights > 0, y, 0.0), weights.shape)  # values that do not count may be nan
    centre, scale = (x.max() + x.min()) / 2, max(float(np.ptp(x)) / 2, 1e-300)
    u = (x - centre) / scale
    powers = np.stack([np.ones_like(u), u, u * u], axis=1)
    drawn = weights > 0
    places = np.unique(np.round(u / PLACE_TOLERANCE))
    distinct = sum((drawn & (np.round(u / PLACE_TOLERANCE) == place)).any(axis=1) for place in places)
    enough = np.asarray(distinct) >= MIN_PLACES
    square = np.einsum("gn,ni,nj->gij", weights, powers, powers)
    right = np.einsum("gn,ni,gn->gi", weights, powers, y)
    square[~enough] = np.eye(3)
    first, slope, bend = np.linalg.solve(square, right[:, :, None])[:, :, 0].T
    flat = ~(bend > MIN_CURVATURE * np.max(np.abs(y), axis=1, initial=1e-300))
    bend = np.where(flat, np.nan, bend)
    vertex = -slope / (2 * bend)
    left = np.min(np.where(drawn, u, np.inf), axis=1)
    right_end = np.max(np.where(drawn, u, -np.inf), axis=1)
    with np.errstate(invalid="ignore"):
        inside = enough & (vertex > left) & (vertex < right_end)
    return Parabola(centre + scale * vertex, first - bend * vertex**2, bend / scale**2, inside)


def line(x: Array, y: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Intercepts and slopes `[g]` of least squares through x and y, each `[n]` or `[g, n]`, by weights `[g, n]`.

    nan where fewer than two different x have weight.
    """
    x, y = np.atleast_2d(x), np.atleast_2d(y)
    weights = np.ones(np.broadcast_shapes(x.shape, y.shape)) if weights is None else weights
    used = np.where(weights > 0, x, 0.0), np.where(weights > 0, y, 0.0)  # values that do not count may be nan
    total = weights.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = (weights * used[0]).sum(axis=1) / total, (weights * used[1]).sum(axis=1) / total
        across, up = used[0] - middle[0][:, None], used[1] - middle[1][:, None]
        spread = (weights * across**2).sum(axis=1)
        slope = np.where(spread > 1e-12 * total, (weights * across * up).sum(axis=1) / spread, np.nan)
    return middle[1] - slope * middle[0], slope
