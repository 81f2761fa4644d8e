"""Greedy texts are those of transformers, token by token; what is cached is what would be computed again."""

from dataclasses import replace

import pytest
import torch
from inference_cases import prompts
from oracle import MODELS, SCALED, copy_weights, oracle_of

from megalite.distributed.mesh import Mesh
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.generate import Request, generate

ALL = {**MODELS, **SCALED}
# transformers caps no scores of these families, and keeps what it cached when a text outgrows its original length.
SAME = [case for case in MODELS if "capped" not in case and "stretched" not in case]
LENGTH, NEW = 48, 24


@pytest.mark.parametrize("case", SAME)
def test_greedy_texts_are_those_of_transformers(case: str, alone: Mesh) -> None:
    """In float32, with prompts of several lengths at once, some of which wait for others to end."""
    family, model = MODELS[case]
    model = replace(model, sequence_length=LENGTH)
    oracle = oracle_of(family, model).float()
    engine = Engine(model, alone, torch.float32)
    copy_weights(engine.decoder, oracle)
    asked = [Request(index, 0, prompt, NEW) for index, prompt in enumerate(prompts(model))]
    found: dict[int, list[int]] = {}
    for drawn in generate(engine, asked, Draw(0), 3, model.vocab_size, None):
        found.setdefault(drawn.request.index, []).append(drawn.token)
    for request in asked:
        given = torch.tensor([request.tokens])
        options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        expected = oracle.generate(given, attention_mask=torch.ones_like(given), **options)[0, given.shape[1] :]
        assert found[request.index] == expected.tolist()


@pytest.mark.parametrize("case", ALL)
@torch.inference_mode()
def test_cached_keys_and_values_change_no_logits(case: str, alone: Mesh) -> None:
    """In float64, against the decoder of training over whole sequences."""
    family, model = ALL[case]
    engine = Engine(model, alone, torch.float64)
    copy_weights(engine.decoder, oracle_of(family, model))
    whole = prompts(model, (24, 12, 19))
    cache = engine.cache(3, 24)
    logits = engine.prompts([text[:5] for text in whole], cache, range(3), lengths=[24, 12, 19])
    assert logits is not None
    found = [list(part) for part in logits.split(5)]
    for at in range(5, 24):  # a text that is over goes on with whatever there is: the others do not see it
        tokens = [text[at] if at < len(text) else 0 for text in whole]
        logits = engine.next(tokens, [at] * 3, cache)
        assert logits is not None
        for row, logit in zip(found, logits, strict=True):
            row.append(logit)
    for text, rows in zip(whole, found, strict=True):
        expected = engine.decoder(torch.tensor(text)[:, None])[:, 0]
        torch.testing.assert_close(torch.stack(rows[: len(text)]), expected, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_texts_of_several_lengths_do_not_see_each_other(alone: Mesh) -> None:
    family, model = MODELS["qwen3_capped_windows"]
    engine = Engine(model, alone, torch.float64)
    copy_weights(engine.decoder, oracle_of(family, model))
    whole = prompts(model, (24, 12, 19))
    starts = (7, 2, 11)
    cache = engine.cache(3, 24)
    logits = engine.prompts([text[:start] for text, start in zip(whole, starts, strict=True)], cache, range(3))
    assert logits is not None
    found = [list(part) for part in logits.split(starts)]
    for step in range(10):
        at = [start + step for start in starts]
        tokens = [text[min(place, len(text) - 1)] for text, place in zip(whole, at, strict=True)]
        logits = engine.next(tokens, [min(place, 23) for place in at], cache)
        assert logits is not None
        for row, logit in zip(found, logits, strict=True):
            row.append(logit)
    for text, rows in zip(whole, found, strict=True):
        expected = engine.decoder(torch.tensor(text)[:, None])[:, 0]
        count = min(len(rows), len(text))
        torch.testing.assert_close(torch.stack(rows[:count]), expected[:count], rtol=0, atol=1e-12)
