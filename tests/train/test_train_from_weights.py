"""Training from a Hugging Face folder: every layout begins with the same weights, and transformers' loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES, transformers
from ranks import Ranks
from toy_jobs import Parts, advance, assemble, config_of, make, one_rank, parts, restorer

from megalite.checkpoint.weights.sources import read_model
from megalite.commands.verify import random_batch
from megalite.config.layout import Layout
from megalite.config.schema import Config
from megalite.plan.model.weights import weights
from megalite.train.step import gradients

LAYOUTS = {
    "hybrid": (Layout(dp_replicate=2, dp_shard=2, tp=2), "1f1b"),
    "deep": (Layout(pp=4, dp_shard=2), "zb_h1"),
    "interleaved": (Layout(pp=2, dp_shard=2, tp=2), "interleaved_1f1b"),
    "V": (Layout(pp=2, dp_shard=4), "zbv"),
    "context": (Layout(dp_shard=2, cp=2, tp=2), "1f1b"),
}


def config_for(folder: Path, layout: Layout, schedule: str = "1f1b") -> Config:
    config = config_of(layout, replace(read_model(f"hf:{folder}"), sequence_length=16), schedule)
    config.parallel.pipeline.split = None
    return config


def begin(config: Config, folder: Path) -> tuple[float, Parts]:
    """The loss of the first step from the folder's weights, and the weights before it."""
    job = make(config)
    restorer(job, config).weights(f"hf:{folder}")
    here = {name: part for name, part in parts(job).items() if " " not in name}  # without states of the optimizer
    return advance(job, 0, 1)[0], here


@pytest.mark.parametrize("name", ["qwen2 tied", "phi3", "qwen3_moe, some layers", "gpt_oss", "deepseek_v3"])
def test_every_layout_begins_alike(name: str, ranks: Ranks, tmp_path: Path) -> None:
    CASES[name].save(tmp_path, torch.bfloat16)
    with one_rank():
        alone = config_for(tmp_path, Layout())
        job = make(alone)
        batch = random_batch(job, 0).tokens.flatten(0, -2)
        loss, here = begin(alone, tmp_path)
        expected = {key: part.values for key, part in here.items()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        found = theirs(input_ids=batch[:, :-1], labels=batch[:, 1:], shift_labels=batch[:, 1:].contiguous()).loss
    assert loss == pytest.approx(found.item(), rel=1e-6)  # transformers rounds to float32 in norms and softmax
    assert expected.keys() == weights(alone.model).keys()
    chosen = LAYOUTS if name == "qwen2 tied" else {"V": LAYOUTS["V"]}
    for layout, schedule in chosen.values():
        results = ranks.run(begin, config_for(tmp_path, layout, schedule), tmp_path)
        assert {round(each, 11) for each, _ in results} == {round(loss, 11)}, layout
        assembled = assemble([there for _, there in results])
        assert all(torch.equal(assembled[key], tensor) for key, tensor in expected.items())


def test_a_masked_loss_is_that_of_labels_that_transformers_ignores(tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path)
    config = config_for(tmp_path, Layout())
    with one_rank():
        job = make(config)
        restorer(job, config).weights(f"hf:{tmp_path}")
        batch = random_batch(job, 0, masked=True)
        loss = gradients(job, batch).item()
    assert batch.trained is not None
    tokens = batch.tokens.flatten(0, -2)
    labels = tokens[:, 1:].where(batch.trained.targets.flatten(0, -2), -100)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        found = theirs(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels.contiguous()).loss
    assert loss == pytest.approx(found.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"ffn": 47}, r"model.ffn = 47: the checkpoint .* has 48"), ({"vocab_size": 99}, "model.vocab_size = 99")],
)
def test_another_model_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path)
    config = config_for(tmp_path, Layout())
    config.model = replace(config.model, **change)
    with one_rank(), pytest.raises(ValueError, match=told):
        restorer(make(config), config).weights(f"hf:{tmp_path}")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = CASES["llama"].make()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path)
    config = config_for(tmp_path, Layout())
    with one_rank(), pytest.raises(ValueError, match=r"NaN or infinity in model\.layers\.1\.mlp\.up\.weight"):
        restorer(make(config), config).weights(f"hf:{tmp_path}")


def test_a_width_of_heads_may_be_told_or_left_out(tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path)
    config = config_for(tmp_path, Layout())
    with one_rank():
        left_out, _ = begin(config, tmp_path)
        config.model = replace(config.model, head_width=8)
        told, _ = begin(config, tmp_path)
    assert told == left_out
