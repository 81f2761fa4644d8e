"""Experts made of the feed-forwards of a dense model (sparse upcycling, arXiv 2212.05055). Imports no torch.

    f  hidden width of the dense feed-forward    E, K  experts, those of a token    g  slices of f, one for an expert

A shared expert has the first features of f, and the others are those of which slices are. So feed-forwards are divided
in LLaMA-MoE v2 (arXiv 2411.15708) and CMoE (arXiv 2502.04416), which choose features by what they do with some text.
Expert e is slice e mod g of the feed-forward, so g neighbours, a virtual group (arXiv 2410.07524), are one copy of it.
Rows of the router are random with a mean of 0, and equal within a group, so that its experts are chosen together: a
token takes K/g whole copies. Matrices `down` are multiplied by what makes the scores of each slice add up to 1. The
gate of a shared expert begins at 0, a score of one half.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.base.errors import InputError, Problem, listing
from megalite.checkpoint.weights.maps.models import plain_model
from megalite.config.model_schema import Experts, Model
from megalite.config.rules.model import model_rules
from megalite.config.rules.numbers import divisors, multiples
from megalite.plan.model.weights import weights
from megalite.plan.parts.roles import CORRECTION, ROUTER

BEGUN = (ROUTER, CORRECTION)  # roles of weights that are not made of the dense model's, but begin as in a new model


@dataclass(frozen=True)
class Upcycling:
    """Way from the weights of a `dense` model to those of `model`.

    noise: standard deviation of what is added to elements of experts. seed: of noise and routers.
    """

    dense: Model
    model: Model
    experts: Experts
    noise: float
    seed: int

    @property
    def width(self) -> int:
        """Hidden features of an expert."""
        return self.experts.width or self.model.ffn

    @property
    def shared(self) -> int:
        """Hidden features of the shared expert."""
        return self.experts.shared_width or 0

    @property
    def slices(self) -> int:
        return (self.dense.ffn - self.shared) // self.width

    @property
    def shared_factor(self) -> float:
        """Factor of the matrix `down` of a shared expert."""
        return 2.0 if self.experts.shared_gate else 1.0

    @property
    def factor(self) -> float:
        """Factor of matrices `down` of other experts."""
        if self.experts.normalize:
            total = 1.0
        else:  # the sum of a token's scores where a router gives all the same
            each = 1 / self.experts.count if self.experts.scores == "softmax" else 0.5
            total = self.experts.active * each
        return self.slices / (total * self.experts.scale)

    def inexact(self) -> Iterator[str]:
        """Reasons why logits are not those of the dense model."""
        experts, all_chosen = self.experts, self.experts.active == self.experts.count
        if self.noise:
            yield f"--upcycle-noise = {self.noise:g} changes experts"
        if experts.active % self.slices:
            yield f"model.experts.active = {experts.active} experts are no whole copies, of {self.slices} slices each"
        each = experts.count // experts.groups
        if each % self.slices and (self.slices % each or experts.active_groups % (self.slices // each)):
            yield f"model.experts.groups = {experts.groups} divide copies, of {self.slices} slices each"
        if not experts.normalize and not (experts.scores == "softmax" and all_chosen):
            yield "model.experts.normalize = false: what a token's scores add up to is another number for every token"


def upcycling(dense: Model, model: Model, noise: float, seed: int) -> Upcycling:
    """The way from a dense model to `model`. Raises InputError with all that is in its way."""
    if dense.experts is not None:
        rule = (
            f"the source has model.experts.count = {dense.experts.count} already; give a dense model, or leave it out"
        )
        raise InputError(f"--upcycle: {rule}")
    if model.experts is None:
        raise InputError("--upcycle: gives the model no experts; give their number, as in model.experts.count=8")
    found = Upcycling(dense, model, model.experts, noise, seed)
    if problems := [*_differences(found), *model_rules(model), *_sizes(found)]:
        raise InputError(problems)
    known = weights(dense)
    for name, weight in weights(model).items():
        if weight.role not in BEGUN and dense_name(name) not in known:
            raise InputError(f"--upcycle: a dense model has nothing of which {name} could be made")
    return found


def dense_name(name: str) -> str:
    """The name of the dense weight that the weight called `name` is made of, a slice of it if it is of experts."""
    return name.replace(".experts.", ".").replace(".shared.", ".")


def _differences(found: Upcycling) -> Iterator[Problem]:
    ours, theirs = plain_model(found.dense), plain_model(replace(found.model, experts=None))
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            rule = f"must be the source's, {ours.get(key)}: only model.experts can be added"
            yield Problem(key, rule, "leave it out", theirs.get(key))


def _sizes(found: Upcycling) -> Iterator[Problem]:
    if found.experts.gate != "swiglu":
        rule = "must be swiglu, as the source's feed-forward is one"
        yield Problem("model.experts.gate", rule, "leave it out", found.experts.gate)
    ffn, width, count = found.dense.ffn, found.width, found.experts.count
    if found.shared >= ffn:
        rule = f"must be less than the source's model.ffn = {ffn}, of which other experts have the rest"
        yield Problem("model.experts.shared_width", rule, f"use {ffn // 2}", found.shared)
    elif (rest := ffn - found.shared) % width:
        less = f" - {found.shared} of a shared expert" if found.shared else ""
        rule = f"must divide the source's model.ffn = {ffn}{less}, so that experts are slices of it"
        yield Problem("model.experts.width", rule, f"use {listing(divisors(rest, width))}", width)
    elif count % found.slices:
        rule = f"must be a multiple of {found.slices}, since so many experts are one copy of the source's feed-forward"
        yield Problem("model.experts.count", rule, f"use {listing(multiples(count, found.slices, 1 << 20))}", count)
