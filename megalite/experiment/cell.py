"""A cell: one run of an experiment, and what makes two of them the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.config.model_schema import Model
from megalite.config.schema import Config
from megalite.experiment.schema import Size
from megalite.plan.model.size import flops_per_token, model_parameters

MAX_SLUG_LENGTH = 60  # characters


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, by the three ways to count them."""

    total: int
    with_head: int  # without the embedding's table, with the output layer; a tied table counts once, as that layer
    non_embedding: int  # parameters of layers and norms alone

    @staticmethod
    def of(model: Model) -> "Counts":
        found = model_parameters(model)
        head = model.vocab_size * model.width if model.tie_embeddings else found.head
        layers = found.attention + found.mlp + found.norms
        return Counts(found.total, layers + head, layers)

    def by(self, size: Size) -> int:
        return {"total": self.total, "with_head": self.with_head, "non_embedding": self.non_embedding}[size]


@dataclass(frozen=True)
class Cell:
    """One run.

    config: checked, for so many ranks. plain: the same as plain dictionaries. axes: the swept keys with their values.
    budget: what the length of a ladder's run was asked as. parent, start: the id of a run whose checkpoint of step
    `start` this one goes on from. round: of successive halving. name: of its run folder.
    """

    id: str
    slug: str
    kind: str
    config: Config
    plain: Mapping[str, Any]
    gpus: int
    rung: str = ""
    axes: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    parent: str = ""
    start: int = 0
    round: int = 0
    name: str = ""

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def steps(self) -> int:
        return self.config.train.steps

    @property
    def evaluates(self) -> bool:
        return self.config.eval.steps > 0 and bool(self.config.data.valid)

    @property
    def step_tokens(self) -> int:
        return self.config.batch.global_ * self.config.model.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole training, those that a parent has trained on included."""
        return self.steps * self.step_tokens

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs of the whole training, with attention counted in full, and as the causal half."""
        model = self.config.model
        return self.tokens * flops_per_token(model, "full"), self.tokens * flops_per_token(model, "causal")


def slug_of(parts: Mapping[str, Any]) -> str:
    """A name for people, of what sets a run apart: `60m-lr0.01-seed1`. Two runs may have the same."""
    words = [_word(key.rpartition(".")[2], value) for key, value in parts.items()]
    text = "-".join(filter(None, words)) or "run"
    return text[:MAX_SLUG_LENGTH].rstrip("-.") or "run"


def _word(name: str, value: Any) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{name}{shown}").strip("_.")
