"""The loss of a model on token stores."""

import math
from pathlib import Path

import inference_cases
import numpy as np
import pytest
import torch

from megalite.base.errors import InputError
from megalite.checkpoint.store.host_group import HostGroup
from megalite.data.description import TokenizerFile
from megalite.data.store_writer import StoreWriter
from megalite.data.tokenizer import tokenizer_hash
from megalite.distributed.mesh import Mesh
from megalite.inference.engine import Engine
from megalite.inference.perplexity import Perplexity, measure

END = 0
LETTERS = inference_cases.Letters(Path("letters"))
LENGTHS = (3, 1, 40, 41, 97, 7)  # beside the end; the model's sequence has 40


def written(path: Path, documents: list[list[int]], end: int | None = END) -> str:
    with StoreWriter(path, "<i4", end_of_document=end) as writer:
        for document in documents:
            writer.add(np.array(document))
    return str(path)


@pytest.fixture
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [[*torch.randint(1, 64, (length,), generator=generator).tolist(), END] for length in LENGTHS]


def losses(engine: Engine, tokens: list[int]) -> list[float]:
    """The losses of all tokens but the first, in windows that each see one token of the one before."""
    found = []
    for start in range(0, len(tokens) - 1, 40):
        window = torch.tensor(tokens[start : start + 41])
        chances = engine.decoder(window[:-1, None])[:, 0].log_softmax(-1)
        found += (-chances.gather(1, window[1:, None])[:, 0]).tolist()
    return found


def measured(engine: Engine, prefix: str, end: int | None, limit: int | None = None, text: bool = True) -> Perplexity:
    found = measure(engine, HostGroup(), prefix, LETTERS if text else None, end, limit)
    assert found is not None
    return found


@torch.inference_mode()
@pytest.mark.parametrize("at_a_time", [1, 1 << 20])
def test_losses_are_those_of_documents(
    at_a_time: int, documents: list[list[int]], alone: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of one window and of several are scored a few at a time, or all at once."""
    monkeypatch.setattr("megalite.inference.perplexity.CHUNK_TOKENS", at_a_time)
    engine = inference_cases.engine_of(alone)
    found = measured(engine, written(tmp_path / "store", documents), None)
    each = [losses(engine, [END, *document]) for document in documents]
    means = [sum(loss) / len(loss) for loss in each]
    total = sum(map(sum, each))
    assert (found.documents, found.tokens) == (6, sum(LENGTHS) + 6)
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-10)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / sum(LENGTHS), rel=1e-10)
    assert found.document_loss["p50"] == pytest.approx(np.quantile(means, 0.5), rel=1e-10)
    assert found.worst_documents == sorted(range(6), key=lambda number: -means[number])[:5]
    limited = measured(engine, str(tmp_path / "store"), None, limit=3)
    chosen = [each[number] for number in (0, 2, 5)]
    assert limited.loss == pytest.approx(sum(map(sum, chosen)) / sum(map(len, chosen)), rel=1e-10)


@torch.inference_mode()
def test_where_no_end_is_known_first_tokens_are_not_scored(
    documents: list[list[int]], alone: Mesh, tmp_path: Path
) -> None:
    engine = inference_cases.engine_of(alone)
    plain = [document[:-1] for document in documents]
    prefix = written(tmp_path / "store", plain, end=None)
    found = measured(engine, prefix, None, text=False)
    each = [losses(engine, document) for document in plain if len(document) > 1]
    assert (found.documents, found.tokens, found.bits_per_byte) == (5, sum(LENGTHS) - 6, None)
    assert found.loss == pytest.approx(sum(map(sum, each)) / found.tokens, rel=1e-10)
    assert measured(engine, prefix, END).tokens == sum(LENGTHS)


@torch.inference_mode()
@pytest.mark.parametrize("end", [END, None])
def test_only_trained_tokens_count(end: int | None, documents: list[list[int]], alone: Mesh, tmp_path: Path) -> None:
    """Those of the mask, in documents of one window and of several; documents without one are left out."""
    engine = inference_cases.engine_of(alone)
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(len(tokens), generator=generator) < 0.4 for tokens in documents]
    masks[3][:] = False
    masks[2][:] = True
    with StoreWriter(tmp_path / "store", "<i4", end_of_document=end, masked=True) as writer:
        for tokens, mask in zip(documents, masks, strict=True):
            writer.add(np.array(tokens), mask.numpy())
    found = measured(engine, str(tmp_path / "store"), None)
    first = int(end is None)
    each = [
        np.array(losses(engine, tokens if end is None else [END, *tokens]))[mask[first:].numpy()].tolist()
        for tokens, mask in zip(documents, masks, strict=True)
    ]
    assert not each[3]
    counted = [losses for losses in each if losses]
    count = sum(map(len, counted))
    sizes = [len(mask) - first for mask, losses in zip(masks, each, strict=True) if losses]
    assert (found.documents, found.tokens, found.untrained) == (len(counted), count, sum(sizes) - count)
    assert found.loss == pytest.approx(sum(map(sum, counted)) / count, rel=1e-10)
    text = sum(int(mask[first:].sum()) - int(mask[-1]) * (1 - first) for mask in masks)
    assert found.bits_per_byte == pytest.approx(sum(map(sum, counted)) / math.log(2) / text, rel=1e-10)
    with StoreWriter(tmp_path / "none", "<i4", end_of_document=END, masked=True) as writer:
        writer.add(np.array(documents[0]), np.zeros(len(documents[0]), np.bool_))
    with pytest.raises(InputError, match="no document has a trained token whose loss could be measured"):
        measured(engine, str(tmp_path / "none"), None)


def test_a_store_is_of_the_model_that_an_exports_tokenizer_was_made_of(
    documents: list[list[int]], alone: Mesh, tmp_path: Path
) -> None:
    engine, file = inference_cases.engine_of(alone), tmp_path / "tokenizer.json"
    file.write_text("{}")
    (tmp_path / "tokenizer.model").write_text("the run's")
    for name, fits in (("tokenizer.model", True), ("tokenizer.json", True), ("other", False)):
        (tmp_path / "other").write_text("other")
        made_with = TokenizerFile(name, tokenizer_hash(tmp_path / name))
        with StoreWriter(tmp_path / f"store of {name}", "<i4", END, made_with) as writer:
            writer.add(np.array(documents[0]))
        prefix, tokenizer = str(tmp_path / f"store of {name}"), inference_cases.Letters(file)
        if fits:
            assert measure(engine, HostGroup(), prefix, tokenizer, END, None) is not None
        else:
            with pytest.raises(InputError, match="was made with other, which is not"):
                measure(engine, HostGroup(), prefix, tokenizer, END, None)


def test_stores_that_cannot_be_measured_are_refused(alone: Mesh, tmp_path: Path) -> None:
    engine = inference_cases.engine_of(alone)
    with pytest.raises(InputError, match="no such file"):
        measured(engine, str(tmp_path / "none"), END)
    with pytest.raises(InputError, match="no document has a token"):
        measured(engine, written(tmp_path / "single", [[5]], end=None), None)
    with StoreWriter(tmp_path / "large", "<i4") as writer:
        writer.add(np.array([5, 999]))
    with pytest.raises(InputError, match=r"document 0 has a token id outside model\.vocab_size = 64"):
        measured(engine, str(tmp_path / "large"), None)
