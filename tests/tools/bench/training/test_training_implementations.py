"""megalite, transformers and torchtitan take the same training steps, from the command line too."""

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.base.errors import InputError
from megalite.model.init import fill_normal
from megalite_tools.bench.training import trial, weights
from megalite_tools.bench.training.agreement import apart
from megalite_tools.bench.training.cases import Case
from megalite_tools.bench.training.command import main
from megalite_tools.bench.training.weights import initial_weights

pytest.importorskip("transformers")
CPU = torch.device("cpu")
SIZES = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab_size": 160, "sequence_length": 32}
TINY = (*(f"model.{key}={value}" for key, value in SIZES.items()), "batch.micro=2", "batch.global=4")
SCALED = "model.rope_scaling={kind: llama3, factor: 4.0, original_length: 16}"
STEPS = 20
titan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
IMPLEMENTATIONS = ["transformers", pytest.param("torchtitan", marks=titan)]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def curve(implementation: str, *inputs: str, tuned: bool = False, selective: bool = False) -> list[list[float]]:
    """Loss and gradient norm of every step."""
    case = Case("a", implementation, tuned, selective, model="m", inputs=(*TINY, "optim.lr=0.003", *inputs))
    runner, tokens = trial.built(case, case.config("cpu"), CPU)
    assert tokens.shape == (2, 2, 33)
    steps = [runner(tokens, number) for number in range(STEPS)]
    return [[value.item() for value in each] for each in zip(*steps, strict=True)]


@pytest.mark.parametrize("model", [(), ("model.tie_embeddings=true", SCALED)], ids=["plain", "tied"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_peers_take_the_same_steps_in_float32(implementation: str, model: tuple[str, ...]) -> None:
    loss, norm = curve("megalite", "train.precision=fp32", *model)
    theirs, norms = curve(implementation, "train.precision=fp32", *model, tuned=True)
    assert loss[-1] < 0.75 * loss[0], "a curve that tells something"
    assert theirs == pytest.approx(loss, rel=1e-4)
    assert norms == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_peers_agree_in_bf16_as_shipped_and_tuned(implementation: str, tuned: bool) -> None:
    loss, _ = curve("megalite")
    theirs, _ = curve(implementation, tuned=tuned, selective=implementation == "torchtitan")
    assert apart(loss, theirs) == ""


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        (("optim.lr=0.006",), "another learning rate"),
        (("run.seed=1",), "other weights and tokens"),
        (("optim.betas=[0.5, 0.95]",), "another optimizer"),
    ],
)
def test_what_computes_something_else_disagrees(inputs: tuple[str, ...], fault: str) -> None:
    loss, _ = curve("megalite")
    other, _ = curve("transformers", *inputs, tuned=True)
    assert apart(loss, other) != "", fault


def test_weights_that_are_mapped_wrongly_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = curve("megalite")
    whole = weights._made

    def swapped(ours: weights.Weights, theirs: weights.Theirs) -> torch.Tensor:
        return whole(ours, theirs).flip(0)

    monkeypatch.setattr(weights, "_made", swapped)
    assert apart(loss, curve("transformers")[0]) != ""


def test_initial_weights_are_those_that_training_begins_with() -> None:
    case = Case("a", "megalite", model="m", inputs=TINY)
    config = case.config("cpu")
    made = initial_weights(config.model, 7, CPU)
    expected = torch.empty(160, 64)
    fill_normal(expected, (160, 64), (0, 0), config.model.init_std, "7/embed.weight")
    assert torch.equal(made["embed.weight"], expected)
    assert made["layers.0.attention_norm.weight"].eq(1).all()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("model.qk_norm=true", "plain Llamas"),
        ("model.attention.window=8", "plain Llamas"),
        ("model.embedding_multiplier=2", "no multipliers"),
        ("optim.name=muon", "optim.name adamw"),
        ("train.recompute=selective", "no selective recompute"),
        ("train.offload_activations=true", "no train.offload_activations"),
    ],
)
def test_what_a_peer_cannot_do_is_refused(inputs: str, message: str) -> None:
    case = Case("a", "transformers", model="m", inputs=(*TINY, inputs))
    with pytest.raises(InputError, match=message):
        trial.built(case, case.config("cpu"), CPU)
    assert trial.outcome(InputError("no"), {}) == {"status": "refused", "reason": "no"}


def test_memory_that_runs_out_is_a_result_and_a_mistake_is_none() -> None:
    row = trial.outcome(torch.OutOfMemoryError("CUDA out of memory"), {"stage": "building"})
    assert (row["status"], row["reason"]) == ("oom", "out of memory while building")
    with pytest.raises(ZeroDivisionError):
        trial.outcome(ZeroDivisionError(), {})


def test_liger_needs_a_gpu() -> None:
    case = Case("a", "liger", model="m", inputs=TINY)
    with pytest.raises(InputError, match=r"need a GPU|liger cannot be imported here"):
        trial.built(case, case.config("cpu"), CPU)


def test_a_plan_from_the_command_line_to_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two implementations, and one of ours on two ranks, each in a process of its own; then the table of their rows."""
    of_two = {"ranks": 2, "inputs": ["parallel.tp=2"]}
    plan = {
        "models": {"m": {"inputs": [], "tiny": [*TINY]}},
        "cases": [
            {"id": "ours", "value": 3, "model": "m", "implementation": "megalite", "trace": True},
            {"id": "peer", "value": 2, "model": "m", "implementation": "transformers", "tuned": True},
            {"id": "both", "value": 1, "model": "m", "implementation": "megalite", **of_two},
        ],
    }
    path, out = tmp_path / "plan.yaml", tmp_path / "out"
    path.write_text(json.dumps(plan))
    code = main(["run", "--plan", str(path), "--out", str(out), "--device", "cpu", "--tiny", "--seconds", "300"])
    told = capsys.readouterr()
    assert code == 0, told.err
    rows = {name: json.loads((out / "rows" / f"{name}.json").read_text()) for name in ("ours", "peer", "both")}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok"), told.err
    for row in rows.values():
        assert len(row["loss"]) == len(row["grad_norm"]) == STEPS
        assert row["loss"][-1] < row["loss"][0]
        assert row["step_ms"]["p10"] <= row["step_ms"]["median"] <= row["step_ms"]["p90"]
        assert row["tok_s"] * row["ranks"] * row["step_ms"]["median"] / 1e3 == pytest.approx(4 * 64, rel=1e-4)
        assert row["ms_by_kind"]["gemm"] > 0
        assert "stage" not in row
    assert rows["ours"]["predicted"]["step_ms"] > 0
    assert rows["both"]["settings"]["layout"] == "tp 2"
    assert (out / "traces" / "ours.json.gz").exists()
    assert main(["table", "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert "transformers, tuned" in table
    assert len(re.findall(r"\d → \d", table)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--cases", "nobody"], "has no case 'nobody'; it has a"),
        (["run", "--again", "nobody"], "has no case 'nobody'"),
        (["run", "--part", "4"], "--part 4: "),
        (["one", "--case", "nobody"], "has no case 'nobody'"),
        (["one", "--case", "a"], "a: is a program; `run --cases a` runs it"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text('cases: [{id: a, command: ["true"]}]')
    assert main([*arguments, "--plan", str(path), "--out", str(tmp_path / "out"), "--device", "cpu", "--tiny"]) == 2
    assert message in capsys.readouterr().err
