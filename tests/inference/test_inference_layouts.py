"""The text does not depend on the layout."""

from dataclasses import replace
from typing import Any

import inference_cases
import pytest
import torch
from ranks import Ranks

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Experts, Latent, MultiToken, RopeScaling
from megalite.distributed.mesh import Mesh
from megalite.inference.draw import Draw
from megalite.inference.engine import check_layout
from megalite.inference.generate import Request, Timing, generate

EXPERTS = Experts(8, 3, 24, first_dense=1, scores="sigmoid", balance_loss=0.1)
LATENT = {
    "kv_heads": 8,
    "head_width": 10,
    "rotary_width": 4,
    "qk_norm": False,
    "qkv_bias": False,
    "attention": Attention(window=7, full_every=2, latent=Latent(20, 12, 6)),
}
GPT_OSS = {
    "out_bias": True,
    "attention": Attention(5, 2, sinks=True),
    "experts": replace(EXPERTS, gate="clamped", biases=True),
}
GEMMA = {
    "norm": "both",
    "norm_gain": "one_plus_weight",
    "activation": "gelu",
    "embedding_multiplier": 6.0,
    "logits_softcap": 4.0,
    "attention": Attention(7, 2, window_rope_theta=50.0, scale=0.2, softcap=2.0),
}
LAYOUTS = [Layout(tp=4), Layout(pp=4), Layout(dp_shard=2, pp=2, tp=2)]


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_embeddings": True, "vocab_size": 61}, {"experts": EXPERTS}, LATENT, GPT_OSS, GEMMA],
    ids=str,
)
def test_every_layout_writes_the_same_texts(change: dict[str, Any], ranks: Ranks) -> None:
    """Greedily and at random; with windows in some layers, whose prompts come in several lengths at once."""
    model = replace(inference_cases.MODEL, **change)
    alone, *layouts = zip(*ranks.run(inference_cases.in_layouts, [Layout(), *LAYOUTS], model), strict=True)
    reference = alone[0]
    assert reference is not None
    greedy, random = reference
    assert {len(text) for text in greedy.values()} == {12}
    assert random[0, 0] != random[0, 1]
    for layout, found in zip(LAYOUTS, layouts, strict=True):
        there = [texts for texts in found if texts is not None]
        assert len(there) == layout.world_size
        assert all(texts == reference for texts in there), layout


@pytest.mark.parametrize(
    "change",
    [
        # With a small base and a large factor, angles of another length draw other tokens.
        {"rope_theta": 10.0, "rope_scaling": RopeScaling("dynamic", 8.0, original_length=9)},
        LATENT,
        GPT_OSS,
        {"vocab_size": 5, "tie_embeddings": True},
    ],
    ids=str,
)
def test_drafts_change_no_text(change: dict[str, Any], ranks: Ranks) -> None:
    model = replace(inference_cases.MODEL, **{"vocab_size": 7, **change}, mtp=MultiToken(1))
    layouts = [Layout(), Layout(dp_shard=2, pp=2, tp=2)]
    found = list(zip(*ranks.run(inference_cases.drafted, layouts, model), strict=True))
    for layout, there in zip(layouts, found, strict=True):
        assert [each for each in there if each is not None] == [True] * layout.world_size, layout


def test_all_ranks_tell_of_logits_that_are_not_finite(ranks: Ranks) -> None:
    found = ranks.run(inference_cases.refused, Layout(pp=2, tp=2))
    assert [text is not None and "not finite" in text for text in found] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_it_does_not_matter_which_texts_are_written_together(batch: int, alone: Mesh) -> None:
    engine = inference_cases.engine_of(alone)
    draw = Draw(1.0, 0, 0.95, seed=7)
    together = inference_cases.texts(engine, inference_cases.requests(12, samples=2), draw, batch)
    each: dict[tuple[int, int], list[int]] = {}
    for request in inference_cases.requests(12, samples=2):
        each |= inference_cases.texts(engine, [request], draw, 1)
    assert together == each


def test_a_text_ends_with_its_document(alone: Mesh) -> None:
    engine = inference_cases.engine_of(alone)
    whole = inference_cases.texts(engine, inference_cases.requests(16), Draw(0), 2)
    end = whole[1, 0][4]
    cut = inference_cases.texts(engine, inference_cases.requests(16), Draw(0), 2, end)
    assert cut == {key: text[: text.index(end) + 1] if end in text else text for key, text in whole.items()}


def test_of_equal_prompts_one_is_read(alone: Mesh) -> None:
    """All samples of a prompt begin with its cache; those that wait read it again."""
    engine = inference_cases.engine_of(alone)
    timing = Timing()
    asked = [Request(0, sample, [1, 2, 3], 4) for sample in range(5)] + [Request(1, 0, [1, 2, 4], 4)]
    list(generate(engine, asked, Draw(1.0), 6, 64, None, timing))
    assert timing.prompt_tokens == 6
    assert timing.tokens == 6 * 3


@pytest.mark.parametrize("change", [{"experts": EXPERTS}, LATENT], ids=["experts", "latent attention"])
@torch.inference_mode()
def test_it_writes_what_a_forward_pass_of_the_whole_text_would(change: dict[str, Any], alone: Mesh) -> None:
    engine = inference_cases.engine_of(alone, replace(inference_cases.MODEL, **change))
    written = inference_cases.texts(engine, inference_cases.requests(8), Draw(0), 3)
    for index, prompt in enumerate(inference_cases.prompts()):
        text = [*prompt, *written[index, 0]]
        best = engine.decoder(torch.tensor(text[:-1])[:, None])[:, 0].argmax(-1)
        assert best[len(prompt) - 1 :].tolist() == written[index, 0]


def test_ranks_share_out_whole_experts() -> None:
    model = replace(inference_cases.MODEL, experts=replace(EXPERTS, count=6))
    check_layout(model, Layout(tp=2))
    check_layout(model, Layout(dp_shard=3, tp=2, ep=6))
    with pytest.raises(InputError, match=r"--tp 4: must divide model.experts.count = 6"):
        check_layout(model, Layout(tp=4))
    with pytest.raises(InputError, match=r"--ep 4: must divide model.experts.count = 6"):
        check_layout(model, Layout(dp_shard=2, tp=2, ep=4))
    with pytest.raises(InputError, match=r"--ep 4: the model has no experts; leave it out"):
        check_layout(inference_cases.MODEL, Layout(dp_shard=4, ep=4))
    with pytest.raises(InputError, match=r"model.experts.force_balance = true: the model was trained for measuring"):
        check_layout(replace(model, experts=replace(model.experts, force_balance=True)), Layout())
