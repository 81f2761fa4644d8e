"""What holds for every decoder, whatever its weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.config.model_schema import Model
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize

MODEL = Model(layers=5, width=24, heads=4, kv_heads=2, ffn=40, vocab_size=36, sequence_length=12, init_std=0.2)


def _stage(model: Model, mesh: Mesh, layers: range) -> Decoder:
    first, last = layers.start == 0, layers.stop == model.layers
    stage = Decoder(model, mesh.tp, layers, first, last).to(torch.float64).to_empty(device="cpu")
    initialize(stage, model, seed=0)
    return stage


def _tokens() -> Tensor:
    return torch.randint(MODEL.vocab_size, (MODEL.sequence_length, 3), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_another_are_the_whole(tied: bool, alone: Mesh) -> None:
    model = replace(MODEL, tie_embeddings=tied)
    whole = _stage(model, alone, range(5))
    stages = [_stage(model, alone, layers) for layers in (range(2), range(2, 3), range(3, 5))]
    x = _tokens()
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(_tokens()))

    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert set(names) == {name for name, _ in whole.named_parameters()}
    twice = {name for name in names if names.count(name) > 1}
    assert twice == ({"embed.weight"} if tied else set())


def test_no_position_sees_a_later_token(alone: Mesh) -> None:
    decoder, tokens, changed = _stage(MODEL, alone, range(5)), _tokens(), 7
    before = decoder(tokens)
    tokens[changed] = (tokens[changed] + 1) % MODEL.vocab_size
    after = decoder(tokens)
    assert torch.equal(before[:changed], after[:changed])
    assert (before[changed:] != after[changed:]).any(dim=-1).all()


def test_sequences_of_a_micro_batch_are_independent(alone: Mesh) -> None:
    decoder, tokens = _stage(MODEL, alone, range(5)), _tokens()
    together = decoder(tokens)
    for index, sequence in enumerate(tokens.split(1, dim=1)):
        torch.testing.assert_close(decoder(sequence)[:, 0], together[:, index], rtol=1e-12, atol=1e-13)


def test_first_loss_is_near_that_of_guessing(alone: Mesh) -> None:
    """With small weights the logits are nearly 0, so every token is as likely as any other."""
    decoder, tokens = _stage(replace(MODEL, init_std=1e-4), alone, range(5)), _tokens()
    loss = decoder(tokens, targets=tokens)
    guessing = tokens.numel() * torch.tensor(float(MODEL.vocab_size), dtype=torch.float64).log()
    torch.testing.assert_close(loss, guessing, rtol=1e-3, atol=0)
