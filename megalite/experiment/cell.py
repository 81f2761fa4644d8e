"""A cell: one run of an experiment, and what makes two of them the same."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megalite.config.convert import to_plain
from megalite.config.schema import Config, Model
from megalite.experiment.schema import Size
from megalite.plan.model.size import flops_per_token, model_parameters

HASH_DIGITS = 10  # in a run's name
MAX_SLUG_LENGTH = 60  # characters
UNHASHED_KEYS = {"run": ("name", "dir", "cluster"), "checkpoint": (), "log": ()}  # say nothing of what is trained


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


def identity(plain: Mapping[str, Any], keeps_layout: bool) -> str:
    """The id of a run: digits of the SHA-256 of its resolved configuration, as canonical JSON.

    Keys that do not affect the result are left out: where it is written and shown, checkpoints but for the weights that
    a run begins with, and, unless layouts are compared, the layout, as all layouts train alike. Values at their
    defaults are left out as well, so that a key which a later version adds does not change the id of a finished run.
    """
    kept = {section: value for section, value in plain.items() if section not in UNHASHED_KEYS}
    kept["run"] = {key: value for key, value in plain["run"].items() if key not in UNHASHED_KEYS["run"]}
    kept["checkpoint"] = {"weights": plain["checkpoint"]["weights"]}
    if not keeps_layout:
        del kept["parallel"]
        kept["batch"] = {key: value for key, value in plain["batch"].items() if key not in ("micro", "memory")}
    set_ = _besides(_canonical(kept), _defaults())
    text = json.dumps(set_, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


@cache
def _defaults() -> dict[str, Any]:
    return to_plain(Config())


def _besides(plain: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not those of `defaults`."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _besides(value, default)
            if value:
                found[key] = value
        elif value != default or key not in defaults:
            found[key] = value
    return found


def _canonical(value: Any) -> Any:
    """The value with one spelling of each number: 0.0 for -0.0."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return value + 0.0 if isinstance(value, float) else value


def slug_of(parts: Mapping[str, Any]) -> str:
    """A name for people, of what sets a run apart: `60m-lr0.01-seed1`. Two runs may have the same."""
    words = [_word(key.rpartition(".")[2], value) for key, value in parts.items()]
    text = "-".join(filter(None, words)) or "run"
    return text[:MAX_SLUG_LENGTH].rstrip("-.") or "run"


def _word(name: str, value: Any) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{name}{shown}").strip("_.")
