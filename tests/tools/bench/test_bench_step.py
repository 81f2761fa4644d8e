"""`megalite-bench-step`, on a model too small to tell anything about time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config.load import load
from megalite_tools.bench import peer
from megalite_tools.bench.peer import build_peer
from megalite_tools.bench.step import COMPARED_STEPS, FUSED, PEERS, TOLERANCES, Disagreement, Variant, _compare, main

pytest.importorskip("transformers")
SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 96, "sequence_length": 16}
TINY = [f"model.{key}={value}" for key, value in SIZES.items()]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "empty.yaml"
    path.write_text("model:\n")
    return str(path)


def measured(config: str, out: Path, *more: str) -> dict[str, Any]:
    assert main([config, *TINY, *more, "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    report: dict[str, Any] = json.loads(out.read_text())
    ours, *peers = report["variants"]
    assert ours["name"] == "megalite"
    assert ours["time_ratio"] == 1
    assert len(set(ours["losses"])) == COMPARED_STEPS
    for their in peers:
        for quantity, key in (("loss", "losses"), ("norm", "norms")):
            tolerance = TOLERANCES[report["precision"]][quantity]
            assert their[key] == pytest.approx(ours[key], rel=tolerance)
    return report


def test_both_implementations_compute_the_same(config: str, tmp_path: Path) -> None:
    more = ["model.tie_embeddings=true", "batch.micro=2", "optim.clip_norm=0.01", "--steps", "2"]
    report = measured(config, tmp_path / "new" / "step.json", *more)
    assert report["model"]["width"] == 32
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert [each["name"] for each in report["variants"]] == ["megalite", *PEERS]
    for variant in report["variants"]:
        assert len(variant["seconds"]) == 2
        assert variant["tokens_per_second"] == pytest.approx(4 * 16 / variant["median_seconds"])

    narrow = measured(config, tmp_path / "bf16" / "step.json", "train.precision=bf16", *more, "--fused")
    assert [each["name"] for each in narrow["variants"]] == ["megalite", FUSED]
    for variant in narrow["variants"]:  # both round
        assert variant["losses"] != pytest.approx(report["variants"][0]["losses"], rel=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_layers_of_the_peer_are_compiled_where_ours_are(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [torch.nn.Linear(2, 2)]
    monkeypatch.setattr(peer, "llama", lambda *_: SimpleNamespace(model=SimpleNamespace(layers=layers)))
    monkeypatch.setattr(peer, "adamw", lambda *_: None)
    config = load(["tiny"], [f"train.compile={compiles}"])
    build_peer(SimpleNamespace(config=config, named_parameters=list), {})  # type: ignore[arg-type]
    assert (layers[0]._compiled_call_impl is not None) == compiles


@pytest.mark.parametrize("loss", [2.001, float("nan")])
def test_other_losses_are_refused(loss: float) -> None:
    good = Variant("peer", [1.0, 2.0], [3.0, 3.0])
    _compare(Variant("megalite", [1.0, 2.0], [3.0, 3.0]), [good], TOLERANCES["fp32"])
    with pytest.raises(Disagreement, match="step 1: the loss is"):
        _compare(Variant("megalite", [1.0, loss], [3.0, 3.0]), [good], TOLERANCES["fp32"])
    with pytest.raises(Disagreement, match="step 0: the norm is"):
        _compare(Variant("megalite", [1.0, 2.0], [loss, 3.0]), [good], TOLERANCES["fp32"])
    with pytest.raises(Disagreement, match="step 1: the norm is"):
        _compare(Variant("megalite", [1.0, 2.0], [3.0, 3.0001]), [good], TOLERANCES["fp32"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.qk_norm=true", "model.qk_norm"),
        ("model.norm=post", "model.norm"),
        ("model.activation=gelu", "model.activation"),
        ("model.attention.nope_every=2", "model.attention"),
        ("train.precision=fp64", "train.precision must be fp32 or bf16"),
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
