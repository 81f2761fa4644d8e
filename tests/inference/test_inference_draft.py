"""Drafts against the model's own prediction of the token after the next, from the whole text at once."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from inference_cases import MODEL, engine_of, requests, texts
from toy_jobs import CPU, one_rank

from megalite.config.layers import layer_kinds
from megalite.config.layout import Layout
from megalite.config.model_schema import MultiToken
from megalite.distributed.mesh import Mesh
from megalite.inference.draft import DraftedSteps
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.generate import Text
from megalite.parallel.parameter import part


class Recorded(DraftedSteps):
    """Keeps each draft with the text before it."""

    found: list[tuple[list[int], int]]

    def next(self, active: Sequence[Text]) -> list[list[int]]:
        self.found += [([*text.request.tokens, *text.new], text.draft) for text in active]
        return super().next(active)


def predicted(engine: Engine, tokens: list[int]) -> int:
    """The likeliest token after `tokens`, as the first layer of multi-token prediction has it."""
    sequence, decoder, name = torch.tensor(tokens)[:, None], engine.decoder, str(engine.model.layers)
    assert decoder.embed is not None
    assert decoder.head is not None
    positions, kind = decoder._whole(torch.empty(len(tokens) - 1, dtype=engine.dtype)), layer_kinds(engine.model)[-1]
    assert kind.rotation is not None
    x = decoder.head.norm(decoder.activations(sequence[:-1], positions))
    embedded = engine.model.embedding_multiplier * decoder.embed(sequence[1:])
    attend = positions.attend(engine.model.layers, kind.attention.heads.scores)
    x = decoder.layers[name](x, embedded, positions.angles(kind.rotation), attend)
    return int(decoder.head.logits(x, None)[-1, 0, : engine.model.vocab_size].argmax())


def test_drafts_are_the_predictions_of_the_layer() -> None:
    """A wrong draft changes no text, only how many passes it takes."""
    model = replace(MODEL, vocab_size=7, embedding_multiplier=3.0, mtp=MultiToken(2))
    with one_rank(), torch.inference_mode():
        mesh = Mesh.build(Layout(), CPU, sharded=False)
        assert mesh is not None
        engine = engine_of(mesh, model)
        for name, param in engine.decoder.named_parameters():
            if "norm" in name:  # else a norm of what has a norm changes nothing
                part(param).uniform_(0.3, 3.0)
        Recorded.found = []
        texts(engine, requests(12, 1, model), Draw(1.0, seed=3), 3, steps=Recorded)
        right = [predicted(engine, tokens) == draft for tokens, draft in Recorded.found]
    assert len(right) > 20
    assert all(right)
