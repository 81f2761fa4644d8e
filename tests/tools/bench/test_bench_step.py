"""`megalite-bench-step`, on a model too small to tell anything about time."""

import json
from pathlib import Path

import pytest

from megalite_tools.bench.step import COMPARED_STEPS, Disagreement, Variant, _compare, main

pytest.importorskip("transformers")
SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 96, "sequence_length": 16}
TINY = [f"model.{key}={value}" for key, value in SIZES.items()]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "empty.yaml"
    path.write_text("model:\n")
    return str(path)


def test_both_implementations_compute_the_same(config: str, tmp_path: Path) -> None:
    more = ["model.tie_embeddings=true", "batch.micro=2", "optim.clip_norm=0.01"]
    out = tmp_path / "new" / "step.json"
    assert main([config, *TINY, *more, "--steps", "2", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["model"]["width"] == 32
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    ours, *peers = report["variants"]
    assert ours["name"] == "megalite"
    assert [peer["name"] for peer in peers] == ["transformers, AdamW", "transformers, fused AdamW"]
    assert len(set(ours["losses"])) == COMPARED_STEPS
    for peer in peers:
        assert peer["losses"] == pytest.approx(ours["losses"], rel=1e-5)
        assert peer["norms"] == pytest.approx(ours["norms"], rel=1e-5)
    for variant in report["variants"]:
        assert len(variant["seconds"]) == 2
        assert variant["tokens_per_second"] == pytest.approx(4 * 16 / variant["median_seconds"])
    assert ours["time_ratio"] == 1
    assert [path.name for path in out.parent.iterdir()] == ["step.json"]


@pytest.mark.parametrize("loss", [2.001, float("nan")])
def test_other_losses_are_refused(loss: float) -> None:
    good = Variant("peer", [1.0, 2.0], [3.0, 3.0])
    _compare(Variant("megalite", [1.0, 2.0], [3.0, 3.0]), [good])
    with pytest.raises(Disagreement, match="step 1: the loss is"):
        _compare(Variant("megalite", [1.0, loss], [3.0, 3.0]), [good])
    with pytest.raises(Disagreement, match="step 0: the norm is"):
        _compare(Variant("megalite", [1.0, 2.0], [loss, 3.0]), [good])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.qk_norm=true", "model.qk_norm"),
        ("model.norm=post", "model.norm"),
        ("model.attention.nope_every=2", "model.attention"),
        ("train.precision=bf16", "train.precision"),
        ("optim.clip_norm=0", "optim.clip_norm"),
        ("model.heads=3", "model.heads"),
        ("--steps=0", "--steps=0"),
    ],
)
def test_bad_input(
    config: str, argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step.json"
    assert main([config, *TINY, argument, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
