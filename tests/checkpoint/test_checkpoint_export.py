"""Exports of a run: due at the end and at every n-th step, never stale, made up for where they are missing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_jobs import advance, config_of, make, one_rank, progress_at, restorer, saver

from megalite.base.errors import InputError
from megalite.checkpoint.run.resume import check_export
from megalite.checkpoint.weights.export import is_due
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Attention, Experts, Model
from megalite.config.schema import Checkpoint, Config
from megalite.train.build import Job

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("export", "every", "due"),
    [(None, 0, set()), (None, 2, set()), ("hf", 0, {7}), ("hf", 2, {2, 4, 6, 7}), ("hf", 7, {7})],
)
def test_when_it_is_due(export: Any, every: int, due: set[int]) -> None:
    checkpoint = Checkpoint(export=export, export_every=every)
    assert {step for step in range(8) if step and is_due(checkpoint, step, 7)} == due


def config(every: int = 2) -> Config:
    made = config_of(Layout())
    made.checkpoint = Checkpoint(interval=2, export="hf", export_every=every, keep=1)
    made.train.precision = "fp32"
    return made


def save(job: Job, folder: Path, step: int) -> tuple[str, ...]:
    with saver(job, folder / "checkpoints") as writer:
        writer.save(progress_at(job, step))
        writer.finish()
        return writer.news()[0].problems  # type: ignore[union-attr]


def their_weights(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_exports_are_of_their_checkpoints(tmp_path: Path) -> None:
    """Also where a step is trained again, and where the checkpoint itself is no longer kept."""
    with one_rank():
        job = make(config())
        seen = []
        for step in (2, 4, 4):
            if step == 4:
                for path in (tmp_path / "checkpoints").glob("step-00000004"):
                    path.rename(tmp_path / "other")
            advance(job, len(seen), len(seen) + 1)
            assert save(job, tmp_path, step) == ()
            found = their_weights(tmp_path / f"export/step-{step:08d}")["model.layers.0.self_attn.q_proj.weight"]
            seen.append(found.clone())
            assert torch.equal(found, dict(job.named_parameters())["layers.0.attention.q.weight"].full_tensor())
        assert not torch.equal(seen[1], seen[2])
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["latest", "step-00000002", "step-00000004"]


def test_experts_are_exported_as_they_were_trained(tmp_path: Path) -> None:
    """Without factors of losses, which transformers weighs otherwise."""
    mixed = config()
    mixed.model = replace(mixed.model, qkv_bias=False, experts=Experts(3, 2, width=20, balance_loss=0.01, z_loss=0.01))
    check_export(mixed)
    with one_rank():
        job = make(mixed)
        advance(job, 0, 1)
        assert save(job, tmp_path, 2) == ()
        ours = dict(job.named_parameters())
        found = their_weights(tmp_path / "export/step-00000002")
        own = "layers.1.mlp."
        both = [ours[f"{own}experts.{name}.weight"].full_tensor() for name in ("gate", "up")]
        assert torch.equal(found[f"model.{own}experts.gate_up_proj"], torch.cat(both, 1))
        assert torch.equal(found[f"model.{own}gate.weight"], ours[f"{own}router.weight"].full_tensor())


def test_what_is_missing_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    with one_rank():
        job = make(config())
        save(job, tmp_path, 2)
        target = tmp_path / "export/step-00000002"
        target.rename(tmp_path / "export/.step-00000002.new.converting")  # as a kill would leave it
        with saver(job, tmp_path / "checkpoints") as writer:
            assert writer.export_missing(0) == ()
            assert not target.exists()
            assert writer.export_missing(2) == ()
            assert their_weights(target)


def test_an_export_that_fails_is_told_and_the_checkpoint_stands(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("in the way")
    with one_rank():
        job = make(config())
        (problem,) = save(job, tmp_path, 2)
    assert "step-00000002 cannot be exported: " in problem
    assert "megalite-convert can do it later" in problem
    assert (tmp_path / "checkpoints/step-00000002").is_dir()


def test_an_adapter_is_exported_merged_or_by_itself(tmp_path: Path) -> None:
    """Both are read by transformers and PEFT with the same logits, those of the run."""
    peft = pytest.importorskip("peft")
    base, tokens = config(), torch.arange(8)[None]
    with one_rank():
        assert save(make(base), tmp_path / "base", 2) == ()
        found = {}
        for kind in ("hf", "peft"):
            made = replace(config(), adapter=Adapter(3, 6.0))
            made.checkpoint = replace(
                made.checkpoint, export=kind, weights=f"{tmp_path / 'base/checkpoints/step-00000002'}"
            )
            check_export(made)
            job = make(made)
            restorer(job).weights(made.checkpoint.weights)
            advance(job, 0, 2)
            assert save(job, tmp_path / kind, 2) == ()
            target = tmp_path / kind / "export/step-00000002"
            if kind == "hf":
                model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
            else:
                assert sorted(file.name for file in target.iterdir()) == [
                    "adapter_config.json",
                    "adapter_model.safetensors",
                ]
                beside = transformers.AutoModelForCausalLM.from_pretrained(
                    tmp_path / "base/export/step-00000002", dtype=torch.float32
                )
                plain = beside(tokens).logits
                model = peft.PeftModel.from_pretrained(beside, str(target))
            found[kind] = model(tokens).logits
    torch.testing.assert_close(found["hf"], found["peft"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found["hf"], plain, atol=1e-4)


def test_a_model_that_no_family_has_is_refused_before_training() -> None:
    capped = Config(model=Model(attention=Attention(softcap=30.0)), checkpoint=Checkpoint(export="hf"))
    with pytest.raises(InputError, match=r"no family .* cannot express"):
        check_export(capped)
    capped.checkpoint.export = None
    check_export(capped)
