"""What the ranks are given of a batch: the right tokens, positions and documents."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs_cases import DOCUMENTS, configuration, tokens_are_in_order, validation_losses
from ranks import Ranks
from toy_jobs import make, one_rank

from megalite.config.layers import rotations
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.schema import Data
from megalite.data.loader import Micros
from megalite.parallel.sequence import Method
from megalite.train.build import Job
from megalite.train.inputs import inputs, positions_in_documents

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
PACKED = [5, 6, 7, 0, 8, 9, 0, 0, 4, 3]  # documents of 4, 3, 1 and 2 tokens; 0 ends one


@given(TOKENS)
def test_positions_start_anew_where_documents_begin(tokens: list[int]) -> None:
    documents = Micros.cut_at(torch.tensor([[[*tokens, 1]]]), 0).documents
    positions = positions_in_documents(documents, torch.device("cpu")).flatten().tolist()
    bounds = documents[0][0]
    assert positions == [position for begin, end in pairwise(bounds) for position in range(end - begin)]
    assert bounds == (0, *(at + 1 for at, token in enumerate(tokens[:-1]) if token == 0), len(tokens))


def packed(samples: list[list[int]]) -> Micros:
    """One micro-batch, in which 0 ends documents."""
    return Micros.cut_at(torch.tensor([samples]), 0)


def logits(job: Job, tokens: list[int]) -> torch.Tensor:
    """Of one sequence, `[s, v]`."""
    step = inputs(job, packed([[*tokens, 1]]))
    with torch.no_grad():
        return job.stages[0](step.tokens[0], step.positions[0])[:, 0]


@pytest.mark.parametrize("reset", [False, True])
def test_a_document_comes_out_as_if_it_were_alone(reset: bool) -> None:
    """Wherever it stands: to RoPE only distances count."""
    config = configuration(Layout(), "ring")
    with one_rank():
        job = make(replace(config, data=replace(DOCUMENTS, reset_positions=reset)))
        packed = logits(job, PACKED)
        alone = torch.cat([logits(job, PACKED[begin:end]) for begin, end in ((0, 4), (4, 7), (7, 8), (8, 10))])
        unmasked = logits(make(replace(config, data=Data())), PACKED)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-14)
    assert (unmasked[:4] - packed[:4]).abs().max() < 1e-14
    assert (unmasked[4:] != packed[4:]).any(dim=-1).all()


@pytest.mark.parametrize("balance_loss", [0.0, 0.1])
def test_samples_of_a_micro_batch_come_out_as_if_they_were_alone(balance_loss: float) -> None:
    """One behind the other, so that one call of a kernel takes them as they lie; a balance loss is one of each."""
    first, second = PACKED, [*reversed(PACKED)]
    config = configuration(Layout(), "ring")
    if balance_loss:
        experts = Experts(4, 2, 8, balance_loss=balance_loss)
        config = replace(config, model=replace(config.model, experts=experts))
    with one_rank():
        job = make(config)
        step = inputs(job, packed([[*first, 1], [*second, 1]]))
        with torch.no_grad():
            together = job.stages[0](step.tokens[0], step.positions[0])
        alone = [logits(job, tokens) for tokens in (first, second)]
    assert step.tokens[0].shape == step.targets[0].shape == ((10, 2) if balance_loss else (20, 1))
    torch.testing.assert_close(together.transpose(0, 1).flatten(0, 1), torch.cat(alone), rtol=1e-12, atol=1e-14)


def test_positions_of_whole_sequences_are_made_once_for_a_length() -> None:
    with one_rank():
        job = make(replace(configuration(Layout(), "ring"), data=Data()))
        long, again, short = (
            inputs(job, Micros.cut_at(torch.zeros(m, 2, tokens, dtype=torch.int64), None)).positions
            for m, tokens in ((3, 9), (2, 9), (2, 7))
        )
    assert len({id(each.tables) for each in (*long, *again)}) == 1
    assert len({id(each.attention) for each in (*long, *again)}) == 1
    assert [each[0].losses.share for each in (long, again, short)] == [1 / 48, 1 / 32, 1 / 24]
    assert {len(cos) for cos, _ in short[0].tables.values()} == {6}


def test_angles_are_those_of_the_positions() -> None:
    """Of samples one behind the other, each of which begins anew."""
    batch = packed([[*PACKED, 1], [*reversed(PACKED), 1]])
    with one_rank():
        config = configuration(Layout(), "ring")
        (rotation,) = rotations(config.model)
        restarted = inputs(make(config), batch).positions[0].angles(rotation)
        config = replace(config, data=replace(DOCUMENTS, reset_positions=False))
        running = inputs(make(config), batch).positions[0].angles(rotation)
    first, second = [0, 1, 2, 3, 0, 1, 2, 0, 0, 1], [0, 1, 2, 0, 0, 1, 2, 0, 1, 2]
    for found, table in zip(restarted, running, strict=True):
        assert torch.equal(found, torch.cat((table[first], table[second])))
        assert torch.equal(*table.chunk(2))


def test_without_documents_all_micro_batches_share_their_positions() -> None:
    with one_rank():
        job = make(replace(configuration(Layout(), "ring"), data=Data()))
        positions = inputs(job, Micros.cut_at(torch.zeros(3, 2, 9, dtype=torch.int64), 0)).positions
    assert len(positions) == 3
    assert {(id(each.tables), id(each.attention), each.positions) for each in positions} == {
        (id(positions[0].tables), id(positions[0].attention), None)
    }


@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_the_parts_of_all_ranks_are_the_batch_in_order(method: Method, ranks: Ranks) -> None:
    assert all(ranks.run(tokens_are_in_order, method))


def test_evaluation_sees_every_part_of_a_sequence(ranks: Ranks) -> None:
    told = ranks.run(validation_losses, Layout(pp=2, cp=2, tp=2), "ring")
    alone = told[0][0]
    assert [losses[-1] for losses in told] == [pytest.approx(alone, rel=1e-14)] * 8
