"""The loss is the mean over the trained targets of the global batch, in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from toy_jobs import MODEL, config_of, make, one_rank, saver
from toy_runs import Notes, RandomSamples

from megalite.checkpoint.store.progress import Progress
from megalite.commands.verify import compare, random_batch
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.config.parallel_schema import Context
from megalite.config.schema import Batch, Config, Curriculum, Data, Rampup, Source
from megalite.data.loader import Loader, Micros, Trained
from megalite.data.samples import Sample, Samples
from megalite.data.store_writer import StoreWriter
from megalite.plan.batches import GlobalBatch
from megalite.train.inputs import inputs
from megalite.train.loop import Batches, train
from megalite.train.step import evaluate, gradients, train_step, update

GLOBAL = 12


def differences(config: Config) -> list[tuple[str, float, bool]]:
    return [(each.quantity, each.value, each.passed) for each in compare(config, 2, 1e-10, masked=True)]


def of(layout: Layout, schedule: str = "1f1b", **changes: object) -> Config:
    return replace(config_of(layout, replace(MODEL, sequence_length=16), schedule), **changes)  # type: ignore[arg-type]


CASES = {
    "dp": of(Layout(dp_replicate=2, dp_shard=2)),
    "cp": replace(of(Layout(cp=4, dp_shard=2)), data=Data(mask_documents=True, reset_positions=True)),
    "tp, pieces": of(
        Layout(tp=2, dp_shard=2), batch=Batch(2, 16, rampup=Rampup(8, None, 8), curriculum=Curriculum(4, 40))
    ),
    "pp": of(Layout(pp=2, dp_shard=2), "zbv", batch=Batch(1, 8)),
    "all": of(Layout(pp=2, cp=2, tp=2), "zb_h1", batch=Batch(1, 6)),
    "experts": of(Layout(dp_shard=2, ep=2)),
}
CASES["experts"].model.experts = Experts(4, 2, 6, balance_loss=0.1, z_loss=0.01)
CASES["cp"].parallel.context = Context("ring")


@pytest.mark.parametrize("case", CASES)
def test_a_layout_trains_as_one_process_does(case: str, ranks: Ranks) -> None:
    for found in ranks.run(differences, CASES[case]):
        assert found
        assert all(passed for _, _, passed in found), found


def masked(batch: Micros, bits: torch.Tensor) -> Micros:
    return replace(batch, trained=Trained(bits, int(bits.sum())))


def test_the_loss_and_its_gradients_are_those_of_labels_left_out() -> None:
    with one_rank():
        job = make(config_of(Layout(), MODEL))
        batch = random_batch(job, 3, masked=True)
        assert batch.trained is not None
        counts = batch.trained.targets.sum((1, 2)).tolist()
        loss = gradients(job, batch)
        found = {name: value.grad.full_tensor() for name, value in job.stages[0].named_parameters()}
        job.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        step = inputs(job, random_batch(job, 3))
        share = inputs(job, batch).positions[0].losses.share
        for micro, (tokens, positions, targets) in enumerate(
            zip(step.tokens, step.positions, step.targets, strict=True)
        ):
            logits = job.stages[0](tokens, positions)
            labels = targets.where(batch.trained.targets[micro].T, -100)
            total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        mean = total / sum(counts)
        mean.backward()
        expected = {name: value.grad.full_tensor() for name, value in job.stages[0].named_parameters()}
        assert evaluate(job, [batch]) == pytest.approx(mean.item(), rel=1e-12)
    assert len(set(counts)) > 1  # a mean of micro-batches would differ
    assert share == 1 / 64  # losses of routers are means over all tokens
    assert loss.item() == pytest.approx(mean.item(), rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)


def test_a_batch_without_a_trained_token_has_no_gradient() -> None:
    with one_rank():
        job = make(config_of(Layout(), MODEL))
        batch = random_batch(job, 0)
        none = masked(batch, torch.zeros(batch.tokens[..., 1:].shape, dtype=torch.bool))
        reading = update(job, gradients(job, none), 0).read()
        assert (reading.loss, reading.norm) == (0.0, 0.0)
        assert np.isnan(evaluate(job, [none]))
        full = train_step(job, batch, 1).read()
        assert full.loss > 0


def test_all_tokens_trained_is_as_without_a_mask() -> None:
    with one_rank():
        losses = []
        for bits in (False, True):
            job = make(config_of(Layout(), MODEL))
            batch = random_batch(job, 0)
            if bits:
                batch = masked(batch, torch.ones(batch.tokens[..., 1:].shape, dtype=torch.bool))
            reading = train_step(job, batch, 0).read()
            losses.append((reading.loss, reading.norm))
    assert losses[0] == losses[1]


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    """Of a store in which multiples of 3 are trained, and of one without a mask."""
    with StoreWriter(tmp_path / "masked", "uint16", masked=True) as writer:
        for start in range(0, 300, 50):
            tokens = np.arange(start, start + 50)
            writer.add(tokens, tokens % 3 == 0)
    with StoreWriter(tmp_path / "plain", "uint16") as writer:
        writer.add(np.arange(400, 600))
    return Samples([Source(str(tmp_path / "masked"), 2.0), Source(str(tmp_path / "plain"))], 3, 8, 1000)


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 3), (4, 1), (12, 1)])
def test_every_rank_has_its_bits_and_the_count_of_all(samples: Samples, dp: int, micro: int, pieces: int) -> None:
    ranks = [Loader(samples, micro, dp, rank).read(GlobalBatch(5, GLOBAL, pieces)) for rank in range(dp)]
    total = 0
    for read in ranks:
        assert read.trained is not None
        targets = read.tokens[..., 1:]
        assert torch.equal(read.trained.targets, (targets >= 400) | (targets % 3 == 0))
        total += int(read.trained.targets.sum())
    assert {read.trained.count for read in ranks if read.trained is not None} == {total}
    assert 0 < total < GLOBAL * 8


class ThirdsTrained(RandomSamples):
    """Random samples, of which every third token is trained; in the second step of eight, none."""

    def __getitem__(self, index: int) -> Sample:
        bits = np.arange(self.sequence_length) % 3 == index % 3
        return replace(super().__getitem__(index), trained=bits & (index // 8 != 1))

    def trained_targets(self, indices: Sequence[int]) -> int:
        return sum(int(sample.trained.sum()) for sample in self.read(indices) if sample.trained is not None)


def test_a_run_tells_the_share_of_trained_tokens_and_batches_without_any(tmp_path: Path) -> None:
    with one_rank():
        job, notes = make(config_of(Layout(), MODEL)), Notes()
        samples = ThirdsTrained(MODEL.sequence_length, MODEL.vocab_size)
        loader = Loader(samples, 4, 1, 0)  # type: ignore[arg-type]
        with saver(job, tmp_path) as writer:
            train(job, Batches(loader, None), Progress(), writer, lambda: None, notes)
    trained = [samples.trained_targets(range(8 * step, 8 * step + 8)) for step in range(6)]
    assert trained[1] == 0
    assert notes.curve("trained_share") == {step: count / 64 for step, count in enumerate(trained, 1)}
    assert notes.named("nothing_trained") == [(2, {})]
    losses = notes.curve("loss")
    assert np.isnan(losses.pop(2))
    assert all(loss > 1 for loss in losses.values())
    assert notes.curve("grad_norm")[2] == 0
