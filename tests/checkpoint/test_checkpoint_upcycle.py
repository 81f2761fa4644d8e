"""Experts made of a dense model: they compute the same where they can, whatever the part that is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES, transformers
from torch import Tensor
from toy_jobs import one_rank

from megalite.base.errors import InputError
from megalite.checkpoint.store.state import State
from megalite.checkpoint.weights import convert as engine
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import dcp, huggingface
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.maps.strips import PREFIX
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.checkpoint.weights.upcycle import upcycled
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Base, Experts
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite_tools.checkpoint.convert import main

TOKENS = torch.randint(3, 64, (25, 2), generator=torch.Generator().manual_seed(1))
EXACT = {  # the dense feed-forward has 48 hidden features
    "copies": ("llama", Experts(8, 2)),
    "copies, with a scale": ("qwen3", Experts(5, 3, scale=2.5)),
    "sigmoid": ("llama tied, all heads", Experts(4, 2, scores="sigmoid")),
    "all experts": ("llama", Experts(3, 3, normalize=False)),
    "slices": ("olmo2", Experts(12, 3, width=16)),
    "slices of several copies, in some layers": ("qwen2", Experts(8, 4, width=24, first_dense=1, every=2)),
    "slices, all experts": ("llama", Experts(6, 6, width=16, normalize=False)),
    "slices, sigmoid, with a scale": ("llama", Experts(8, 4, width=12, scores="sigmoid", scale=4.0)),
    "groups": ("llama", Experts(8, 4, width=24, scores="sigmoid", groups=2, active_groups=1, correction_rate=0.001)),
    "groups of half copies, two at a time": ("llama", Experts(8, 4, width=12, groups=4, active_groups=2)),
    "a shared expert": ("llama", Experts(4, 2, width=32, shared_width=16)),
    "a gated one beside slices": (
        "qwen3",
        Experts(8, 4, width=20, first_dense=1, scores="sigmoid", shared_width=8, shared_gate=True),
    ),
    "in turn": ("llama", Experts(8, 4, width=24, force_balance=True)),
}
INEXACT = {
    "scores as they are": (Experts(8, 2, normalize=False), "model.experts.normalize = false: what"),
    "half of a copy": (Experts(8, 3, width=24), "model.experts.active = 3 experts are no whole copies, of 2 slices"),
    "groups of half copies": (
        Experts(12, 2, width=24, groups=4, scores="sigmoid"),
        "model.experts.groups = 4 divide copies, of 2 slices each",
    ),
    "noise": (Experts(8, 2), "--upcycle-noise = 0.1 changes experts"),
}


def dense(name: str, path: Path) -> Weights:
    CASES[name].save(path / "hf", shard="1MB")
    return open_weights(f"hf:{path}/hf")


def with_experts(found: Weights, experts: Experts, noise: float = 0.0, seed: int = 0) -> Weights:
    return upcycled(found, replace(found.folded().model, experts=experts), noise, seed)


def tensors(found: Weights) -> dict[str, Tensor]:
    read = {name: torch.empty(stored.shape) for name, stored in found.index.tensors.items()}
    reader_of(found).fill(read)
    return {name.removeprefix(PREFIX): tensor for name, tensor in read.items()}


def logits(found: Weights) -> Tensor:
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        decoder = Decoder(found.model, mesh.tp, range(found.model.layers)).double().to_empty(device="cpu")
        reader_of(found).fill(State({0: decoder}).weights())
        with torch.no_grad():
            return decoder(TOKENS)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("case", EXACT)
def test_logits_are_those_of_the_dense_model(case: str, tmp_path: Path) -> None:
    name, experts = EXACT[case]
    found = dense(name, tmp_path)
    made = with_experts(found, experts)
    assert made.upcycling is not None
    assert not [*made.upcycling.inexact()]
    assert distance(logits(made), logits(found)) < 1e-12


@pytest.mark.parametrize("case", INEXACT)
def test_reasons_for_other_logits_are_told(case: str, tmp_path: Path) -> None:
    experts, told = INEXACT[case]
    found = dense("llama", tmp_path)
    made = with_experts(found, experts, noise=0.1 if case == "noise" else 0.0)
    assert made.upcycling is not None
    assert [reason for reason in made.upcycling.inexact() if reason.startswith(told)]
    assert distance(logits(made), logits(found)) > 1e-6


def test_scores_that_are_not_divided_begin_near_the_dense_model(tmp_path: Path) -> None:
    """Where the router says little, as it does at the start."""
    found = dense("llama", tmp_path)
    for experts in (Experts(8, 2, normalize=False), Experts(8, 4, width=24, normalize=False, scores="sigmoid")):
        made = with_experts(found, experts)
        small = replace(made, model=replace(made.model, init_std=1e-5))
        assert made.upcycling is not None
        small = replace(small, upcycling=replace(made.upcycling, model=small.model))
        assert distance(logits(small), logits(found)) < 1e-3


def test_experts_are_slices_and_routers_of_a_group_equal(tmp_path: Path) -> None:
    found = dense("llama", tmp_path)
    ours, theirs = tensors(with_experts(found, Experts(8, 4, width=12, every=2, scale=2.0))), tensors(found)
    gate, down, router = (ours[f"layers.1.mlp.{name}.weight"] for name in ("experts.gate", "experts.down", "router"))
    for expert in range(8):
        rows = slice(expert % 4 * 12, expert % 4 * 12 + 12)
        assert torch.equal(gate[expert], theirs["layers.1.mlp.gate.weight"][rows])
        assert torch.equal(down[expert], theirs["layers.1.mlp.down.weight"][:, rows] * 2)  # 4 slices / a scale of 2
        assert torch.equal(router[expert], router[expert // 4 * 4])
    assert not torch.equal(router[0], router[4])
    assert torch.equal(ours["layers.0.mlp.down.weight"], theirs["layers.0.mlp.down.weight"])
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs)


def test_a_shared_expert_has_the_first_features_and_others_the_rest(tmp_path: Path) -> None:
    found = dense("llama", tmp_path)
    experts = Experts(4, 2, width=16, scale=0.5, shared_width=16, shared_gate=True)
    ours, theirs = tensors(with_experts(found, experts, noise=0.01)), tensors(found)
    plain = tensors(with_experts(found, experts))
    own = "layers.2.mlp."
    for name in ("gate", "up"):
        assert torch.equal(ours[f"{own}shared.{name}.weight"], theirs[f"{own}{name}.weight"][:16])
    assert torch.equal(ours[f"{own}shared.down.weight"], theirs[f"{own}down.weight"][:, :16] * 2)  # half of it counts
    assert not ours[f"{own}shared_gate.weight"].any()
    for expert in range(4):
        rows = slice(16 + expert % 2 * 16, 32 + expert % 2 * 16)
        assert torch.equal(plain[f"{own}experts.up.weight"][expert], theirs[f"{own}up.weight"][rows])
        assert torch.equal(plain[f"{own}experts.down.weight"][expert], theirs[f"{own}down.weight"][:, rows] * 4)


def test_routers_have_a_mean_of_0_and_follow_from_the_seed(tmp_path: Path) -> None:
    found = dense("llama", tmp_path)
    one, other = (tensors(with_experts(found, Experts(512, 2), seed=seed)) for seed in (0, 1))
    routers = torch.cat([one[f"layers.{layer}.mlp.router.weight"] for layer in range(4)])
    assert abs(routers.mean()) < 4 * 0.02 / routers.numel() ** 0.5
    assert routers.std().item() == pytest.approx(0.02, rel=0.02)
    different = {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
    assert different == {f"layers.{layer}.mlp.router.weight" for layer in range(4)}


def test_noise_is_added_to_experts_alone(tmp_path: Path) -> None:
    found = dense("llama", tmp_path)
    plain, noisy = (tensors(with_experts(found, Experts(8, 2), noise)) for noise in (0.0, 0.05))
    for name, tensor in plain.items():
        added = noisy[name] - tensor
        if ".experts." not in name:
            assert not added.any()
            continue
        assert added.std().item() == pytest.approx(0.05, rel=0.03)
        assert not torch.equal(noisy[name][0], noisy[name][1])


@pytest.mark.parametrize("block", [1, 200, 1 << 24])
def test_blocks_of_any_size_give_the_same_bytes(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers and noise too, which depend on an element's place alone."""
    made = with_experts(dense("llama", tmp_path), Experts(6, 2, width=24), noise=0.01)
    expected = tensors(made)
    monkeypatch.setattr(engine, "BLOCK", block)
    convert(made, dcp.plan(made, tmp_path / "ours", None, 1), tmp_path / "ours", {})
    written = tensors(open_weights(str(tmp_path / "ours")))
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


def test_multipliers_of_the_source_are_folded(tmp_path: Path) -> None:
    found = dense("llama tied, all heads", tmp_path)
    factors: dict[str, Any] = {"parametrization": "completep", "base": Base(width=5, layers=3, head_width=3)}
    model = replace(found.model, embedding_multiplier=3.0, logits_multiplier=0.7, **factors)
    multiplied = replace(found, model=model)
    made = with_experts(multiplied, Experts(4, 2, width=24))
    assert made.model.embedding_multiplier == 1
    assert distance(logits(made), logits(multiplied)) < 1e-6  # factors are rounded to the files' float32
    assert distance(logits(with_experts(found, Experts(4, 2, width=24))), logits(multiplied)) > 0.01


@pytest.mark.parametrize(("name", "family"), [("llama", "mixtral"), ("qwen3", "qwen3_moe"), ("olmo2", None)])
def test_transformers_computes_the_same(name: str, family: str | None, tmp_path: Path) -> None:
    found = dense(name, tmp_path)
    made = with_experts(found, Experts(8, 4, width=24))
    if family is None:  # OLMoE has its norms before attention and feed-forward
        with pytest.raises(InputError, match=r"cannot express model\.norm = post"):
            huggingface.plan(made, None, None)
        return
    convert(made, huggingface.plan(made, None, None), tmp_path / "out", {})
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / path) for path in ("hf", "out"))
    assert (other.config.model_type, other.config.num_experts_per_tok) == (family, 4)
    with torch.no_grad():
        expected, found_logits = (each(input_ids=TOKENS.T).logits for each in (one, other))
    assert distance(found_logits, expected) < 1e-5


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_any_kind_is_read_and_written(kind: str, tmp_path: Path) -> None:
    found = dense("llama tied, all heads", tmp_path)
    convert(found, plan_of(kind, found, tmp_path / "there", Wanted(tp=2)), tmp_path / "there", {})
    experts = Experts(8, 4, width=10, first_dense=1, shared_width=8)
    made = with_experts(open_weights(f"{tmp_path}/there"), experts, noise=0.01)
    convert(made, plan_of(kind, made, tmp_path / "out", Wanted(tp=2)), tmp_path / "out", {})
    written = open_weights(f"{tmp_path}/out")
    expected = tensors(with_experts(found, experts, noise=0.01))
    assert written.model == made.model
    assert written.kind == kind
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(written).items())


def upcycle(folder: Path, *arguments: str) -> int:
    return main(["--from", f"{folder}/hf", "--to", f"megalite:{folder}/out", *arguments])


def test_the_command_says_before_what_it_makes_and_checks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense("llama", tmp_path)
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    (tmp_path / "moe.yaml").write_text("model: {experts: {count: 8}}")
    report = ["--check", "--json", f"{tmp_path}/report"]
    assert upcycle(tmp_path, "--upcycle", f"{tmp_path}/moe.yaml", "model.experts.width=24", *report) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "upcycle: 8 experts of a layer are 4 copies of its feed-forward, of 2 slices each",
        "upcycle: the logits are those of the source, but for rounding",
    ]
    assert "43 of 43 tensors are the same to the bit" in lines[3]
    assert json.loads((tmp_path / "report").read_text())["check"]["logits"] < 1e-6
    assert open_weights(f"{tmp_path}/out").model.experts == Experts(8, 2, width=24)
    assert (tmp_path / "out/tokenizer.json").exists()
    assert not (tmp_path / "out/config.json").exists()  # it told of the dense model
    (tmp_path / "out").rename(tmp_path / "before")
    assert upcycle(tmp_path, "--upcycle", "model.experts.count=8", "--upcycle-noise", "0.01") == 0
    told = capsys.readouterr()
    assert "warning: --upcycle: the logits will not be those of the source: --upcycle-noise = 0.01" in told.err
    assert "are those of the source" not in told.out


def test_unfinished_work_with_another_seed_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dense("llama", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_publish", lambda *_: (_ for _ in ()).throw(InputError("stopped")))
        assert upcycle(tmp_path, "--upcycle", "model.experts.count=4") == 2
    assert upcycle(tmp_path, "--upcycle", "model.experts.count=4", "run.seed=7") == 0
    expected = tensors(with_experts(found, Experts(4), seed=7))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(open_weights(f"{tmp_path}/out")).items())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--upcycle", "model.norm_eps=1e-6"], "gives the model no experts; give their number, as in model.experts.c"),
        (
            ["--upcycle", "model.experts.width=20"],
            "model.experts.width = 20: must divide the source's model.ffn = 48, so that experts are slices of it; use",
        ),
        (
            ["--upcycle", "model.experts.width=24", "model.experts.count=7"],
            "model.experts.count = 7: must be a multiple of 2, since so many experts are one copy of the source's "
            "feed-forward; use 6 or 8",
        ),
        (
            ["--upcycle", "model.experts.count=8", "model.layers=5"],
            "model.layers = 5: must be the source's, 4: only model.experts can be added; leave it out",
        ),
        (["--upcycle", "model.experts.active=9"], "model.experts.active = 9: must be at most model.experts.count = 8"),
        (["--upcycle", "model.experts.first_dense=4"], "leaves none of the 4 layers with experts; use a smaller"),
        (["--upcycle", "model.experts.number=8"], "model.experts has count, active, width"),
        (
            ["--upcycle", "model.experts.gate=clamped"],
            'model.experts.gate = "clamped": must be swiglu, as the source\'s feed-forward is one; leave it out',
        ),
        (["--upcycle", "model.experts.biases=true"], "has nothing of which layers.0.mlp.router.bias could be made"),
        (
            ["--upcycle", "model.experts.shared_width=48"],
            "model.experts.shared_width = 48: must be less than the source's model.ffn = 48, of which other experts",
        ),
        (
            ["--upcycle", "model.experts.shared_width=8"],
            "model.experts.width = 48: must divide the source's model.ffn = 48 - 8 of a shared expert, so that",
        ),
        (["--upcycle", "model.experts.width=24", "model.experts.shared_gate=true"], "has no meaning without model.exp"),
        (["--upcycle-noise", "0.1"], "--upcycle-noise 0.1: has no meaning without --upcycle"),
    ],
)
def test_what_cannot_be_is_one_message(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense("llama", tmp_path)
    assert upcycle(tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_only_dense_weights_without_states_are_upcycled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CASES["mixtral"].save(tmp_path / "hf")
    assert upcycle(tmp_path, "--upcycle", "model.experts.count=8") == 2
    assert "the source has model.experts.count = 5 already; give a dense model" in capsys.readouterr().err
    found = dense("llama", tmp_path / "dense")
    with pytest.raises(InputError, match="--optimizer: states belong to the dense model's weights; leave it out"):
        with_experts(replace(found, training=Any), Experts())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model\.attention\.softcap = 3\.0: must be the source's, None"):
        upcycled(found, replace(found.model, experts=Experts(), attention=Attention(softcap=3.0)))


@pytest.mark.parametrize("noise", ["-1", "nan", "inf", "2", "much"])
def test_noise_that_is_none_is_refused(noise: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        upcycle(tmp_path, "--upcycle", "model.experts.count=8", f"--upcycle-noise={noise}")
    assert ended.value.code == 2
