"""Scores of texts that share their beginnings are those of each text alone, in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import inference_cases
import pytest
import torch
from oracle import MODELS, SCALED, copy_weights, oracle_of
from ranks import Ranks
from torch import Tensor

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.distributed.mesh import Mesh
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.inference.score import score

ALL = {**MODELS, **SCALED}
LAYOUTS = [Layout(dp_shard=8), Layout(dp_shard=2, pp=2, tp=2), Layout(pp=4, tp=2), Layout(dp_shard=2, tp=4)]


def expected(engine: Engine, stem: Stem) -> list[tuple[float, bool]]:
    found = []
    for branch in stem.branches:
        whole = torch.tensor([*stem.tokens, *branch])
        logits: Tensor = engine.decoder(whole[:-1, None])[:, 0][len(stem.tokens) - 1 :]
        chances = logits.log_softmax(-1).gather(1, whole[len(stem.tokens) :, None])
        found.append((chances.sum().item(), logits.argmax(-1).tolist() == list(branch)))
    return found


@pytest.mark.parametrize("case", ALL)
@torch.inference_mode()
def test_what_begins_alike_is_scored_as_if_alone(case: str, alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows too that begin inside of the shared part; in several passes, and a few logits at a time."""
    family, model = ALL[case]
    model = replace(model, sequence_length=40)
    engine = Engine(model, alone, torch.float64)
    copy_weights(engine.decoder, oracle_of(family, model))
    stems = inference_cases.stems(model.vocab_size)
    monkeypatch.setattr("megalite.inference.score.PASS_TOKENS", 50)
    monkeypatch.setattr("megalite.inference.engine.MAX_LOGITS", 7 * model.vocab_size)
    for stem, scores in zip(stems, score(engine, stems), strict=True):
        for found, (likelihood, greedy) in zip(scores, expected(engine, stem), strict=True):
            assert found.log_likelihood == pytest.approx(likelihood, abs=1e-11)
            assert found.greedy == greedy


@torch.inference_mode()
def test_a_model_with_experts_is_scored_alike(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's experts are chosen by it alone, whatever shares its pass."""
    experts = Experts(6, 2, 24, every=2, balance_loss=0.1)
    engine = inference_cases.engine_of(alone, replace(inference_cases.MODEL, experts=experts))
    monkeypatch.setattr("megalite.inference.score.PASS_TOKENS", 50)
    stems = inference_cases.stems(engine.model.vocab_size)
    for stem, scores in zip(stems, score(engine, stems), strict=True):
        found = [(each.log_likelihood, each.greedy) for each in scores]
        for one, other in zip(found, expected(engine, stem), strict=True):
            assert one == pytest.approx(other, abs=1e-11)


WITH_EP = [
    Layout(dp_shard=8),
    Layout(dp_shard=8, ep=8),
    Layout(dp_shard=8, ep=2),
    Layout(dp_shard=2, pp=2, tp=2, ep=4),
    Layout(dp_shard=4, pp=2, ep=4),
]
CASES: dict[str, tuple[dict[str, Any], list[Layout]]] = {
    "as many tokens as there are": ({}, LAYOUTS),
    "padded": ({"vocab_size": 61}, LAYOUTS),
    "experts": ({"experts": Experts(8, 3, 24, first_dense=1, shared_width=16)}, WITH_EP),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_finds_the_same_scores_and_writes_the_same(case: str, ranks: Ranks) -> None:
    """Replicas share the requests, of which some have none; a text ends with a string wherever it is written."""
    change, layouts = CASES[case]
    model = replace(inference_cases.MODEL, **change)
    leader, *others = ranks.run(inference_cases.answers_in_layouts, layouts, model)
    assert others == [[None] * len(layouts)] * 7
    (scores, written), *rest = leader
    assert any(greedy for _, greedy in scores)
    assert any(len(text) < 9 for text in written)
    assert all(text.index(ord(":")) == len(text) - 1 for text in written if ord(":") in text)
    for layout, (found, texts) in zip(layouts[1:], rest, strict=True):
        assert texts == written, layout
        assert [greedy for _, greedy in found] == [greedy for _, greedy in scores], layout
        assert values(found) == pytest.approx(values(scores), abs=1e-10), layout


def values(scores: Sequence[tuple[float, bool]]) -> list[float]:
    return [likelihood for likelihood, _ in scores]


def test_what_is_not_finite_is_told(alone: Mesh) -> None:
    engine = inference_cases.engine_of(alone, dtype=torch.float32)
    with torch.no_grad():
        for param in engine.decoder.parameters():
            param.to_local().fill_(1e30)
    with pytest.raises(InputError, match="not finite"):
        score(engine, [Stem([1, 2], [[3]])])
    assert score(engine, []) == []
