"""Multi-token prediction against its definition (DeepSeek-V3, arXiv 2412.19437, eq. 21 to 25), position by position."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from toy_jobs import make, one_rank

from megalite.config.model_schema import Experts, Model, MultiToken
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Data, Train
from megalite.data.loader import Micros, Trained
from megalite.model.decoder import Decoder
from megalite.model.positions import TokenPositions
from megalite.parallel.parameter import part
from megalite.train.inputs import inputs
from megalite.train.step import gradients

FACTORS = {"embedding_multiplier": 1.3, "logits_multiplier": 1.7}
MODEL = Model(3, 12, 4, 2, 4, 20, 40, 10, mtp=MultiToken(2, 0.7), init_std=0.3, **FACTORS)
SPEC = Config(model=MODEL, parallel=Parallel(dp_shard=1), batch=Batch(2, 4), train=Train(3, "fp64"))


def batch(masked: bool) -> Micros:
    """Two micro-batches of two samples, in which the token 3 ends a document."""
    generator = torch.Generator().manual_seed(1)
    micros = Micros.cut_at(torch.randint(0, 40, (2, 2, 11), generator=generator), None)
    micros.tokens[0, 1, 4] = micros.tokens[1, 0, 0] = micros.tokens[1, 0, 7] = micros.tokens[1, 0, 8] = 3
    micros = Micros.cut_at(micros.tokens, 3)
    if not masked:
        return micros
    targets = torch.rand(2, 2, 10, generator=generator) < 0.6
    return replace(micros, trained=Trained(targets, int(targets.sum())))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, MODEL.norm_eps)


def expected_loss(stage: Decoder, micros: Micros, positions: list[TokenPositions], documents: bool) -> list[Tensor]:
    """The mean loss of the next token, and of each further one."""
    assert stage.embed is not None
    assert stage.head is not None
    assert stage.head.output is not None
    table, output = part(stage.embed.weight), part(stage.head.output.weight)
    sums, counts = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    losses = [sums[k] for k in range(3)]

    def laid(x: Tensor) -> Tensor:
        """Tokens `[s, b]` as they are run: samples with documents one behind the other."""
        return x.T.reshape(-1, 1) if documents else x

    for m, tokens in enumerate(micros.tokens):
        streams = [norm(stage.activations(laid(tokens[:, :10].T), positions[m]), part(stage.head.norm.weight) * 1.7)]
        for k, name in enumerate(("3", "4"), start=1):
            layer = stage.layers[name]
            ahead = torch.zeros(10, 2, dtype=torch.long)  # the token at position i + k
            ahead[: 11 - k] = tokens[:, k:][:, :10].T
            both = (
                norm(1.3 * F.embedding(laid(ahead), table), part(layer.mtp.embedding_norm.weight)),
                norm(streams[-1], part(layer.mtp.stream_norm.weight)),
            )
            x = torch.cat(both, -1) @ part(layer.mtp.projection.weight).T
            kind = stage.kinds[3]
            how = positions[m].angles(kind.rotation), positions[m].attend(3, kind.attention.heads.scores)
            of_experts = (positions[m].losses,) if kind.mixture else ()
            x, added = super(type(layer), layer).forward(x, *how, None, None, *of_experts)
            streams.append(norm(x + added, part(layer.mtp.output_norm.weight) * 1.7))
        for k, stream in enumerate(streams):
            logits = stream @ output.T
            if documents:
                logits = logits.view(2, 10, -1).transpose(0, 1)
            for b in range(2):
                borders = micros.documents[m][b][1:-1]
                for i in range(10 - k):
                    apart = documents and any(i < border <= i + k for border in borders)
                    if apart or (micros.trained is not None and not micros.trained.targets[m, b, i + k]):
                        continue
                    losses[k] = losses[k] + F.cross_entropy(logits[i, b], tokens[b, i + k + 1])
                    counts[k] += 1
    return [loss / count for loss, count in zip(losses, counts, strict=True)]


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("documents", [False, True], ids=["packed", "documents"])
@pytest.mark.parametrize("experts", [None, Experts(8, 2, 7)], ids=["dense", "experts"])
def test_losses_and_gradients_are_those_of_the_definition(
    experts: Experts | None, documents: bool, masked: bool
) -> None:
    data = Data(mask_documents=documents, end_of_document=3)
    config = replace(SPEC, model=replace(MODEL, experts=experts), data=data)
    micros = batch(masked)
    with one_rank():
        job = make(config)
        (stage,) = job.stages.values()
        mean = gradients(job, micros)
        assert stage.head is not None
        found, means = {name: param.grad for name, param in job.named_parameters()}, stage.head.further
        reference = make(config)
        (twin,) = reference.stages.values()
        positions = list(inputs(reference, micros).positions)
        first, *further = expected_loss(twin, micros, positions, documents)
        (first + 0.7 * torch.stack(further).mean()).backward()
        torch.testing.assert_close(mean, first.detach(), rtol=1e-12, atol=0)
        for name, param in reference.named_parameters():
            assert param.grad is not None
            assert param.grad.to_local().any(), name
            torch.testing.assert_close(
                part(found[name]),
                part(param.grad),
                rtol=1e-10,
                atol=1e-12,
                msg=lambda told, name=name: f"{name}: {told}",
            )
    assert means is not None
    torch.testing.assert_close(means, torch.stack(further).detach(), rtol=1e-12, atol=0)
