"""Published runs of models with experts: how they are read, and how far predictions are from them."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from published_cases import MIXTURE, write

from megalite.config.layers import SwiGLU
from megalite.config.load import load
from megalite.config.presets import preset_or_file
from megalite.cost.constants import FITTED_CONSTANTS
from megalite.cost.layer import ONCE_SHARE, LayerModel
from megalite.plan.model.size import flops_per_token, model_parameters
from megalite.plan.parts.experts import ExpertsPart
from megalite_tools.plan.published.as_configuration import expressed
from megalite_tools.plan.published.expert_facts import STANDING, Facts, fitted, with_facts, without_own_source
from megalite_tools.plan.published.layer_counts import stage_layers
from megalite_tools.plan.published.rows import Row, counted_flops, read_rows
from megalite_tools.plan.published.score import Compared, by_source, score, timed
from megalite_tools.plan.published.step import StepModel

FILE = Path(__file__).with_name("runs_with_experts") / "moe_2026.csv"
UNTUNED = "AWS megatron-bridge dispatcher study"
# By source, rows, and upper bounds of the mean error, as docs/planner_evidence.md has them.
ERRORS = {
    UNTUNED: (11, 0.57),
    "Google gpu-recipes NeMo": (1, 0.01),
    "KempnerForge moe_packed": (4, 0.21),
    "Megatron-Bridge perf skills": (13, 0.07),
    "Megatron-Bridge verification card": (7, 0.21),
    "NVIDIA dgxc recipes": (2, 0.32),
    "NeMo AutoModel": (4, 0.1),
    "Pai-Megatron-Patch users": (4, 0.09),
    "prime-rl baselines": (4, 0.06),
}


@pytest.fixture(scope="module")
def mixtures() -> list[Row]:
    rows, left_out = read_rows(FILE)
    assert not left_out
    return rows


@pytest.fixture(scope="module")
def times(mixtures: list[Row]) -> list[Compared]:
    return timed(mixtures)


def test_step_times_are_predicted_as_well_as_the_documentation_says(times: list[Compared]) -> None:
    for source, group in by_source(times).items():
        rows, most = ERRORS[source]
        found = score(group)
        assert found is not None
        assert len(group) == rows
        assert 0.8 * most - 0.01 < found.mean_abs_error < most, source
    tuned = score([each for each in times if each.row.source != UNTUNED])
    assert tuned is not None
    assert tuned.rows == 39
    assert tuned.mean_abs_error < 0.12
    assert abs(tuned.bias) < 0.03
    latent = score([each for each in times if each.row.work.latent])
    assert latent is not None
    assert latent.rows == 6
    assert latent.mean_abs_error < 0.11


def test_sources_are_predicted_from_the_others(mixtures: list[Row]) -> None:
    tuned = [row for row in mixtures if row.source != UNTUNED]
    found = score(without_own_source(tuned))
    assert found is not None
    assert found.mean_abs_error < 0.14


def test_facts_are_those_that_fit_best(mixtures: list[Row]) -> None:
    facts = fitted(mixtures)
    assert facts.host == STANDING.host
    assert facts.grouped == pytest.approx(STANDING.grouped, rel=0.1)


def test_facts_are_found_again(mixtures: list[Row]) -> None:
    """In rows whose measured times are those of other facts."""
    other = Facts(STANDING.host * 2, STANDING.grouped * 2)
    rows = [row for row in mixtures if row.program.known or row.program.grouped < 1]
    told = timed(with_facts(rows, other))
    made = [replace(row, seconds=each.predicted) for row, each in zip(rows, told, strict=True)]
    assert fitted(made) == pytest.approx(other, rel=0.06)


def test_an_untuned_run_is_not_fitted_on(mixtures: list[Row]) -> None:
    assert {row.program.known for row in mixtures if row.source == UNTUNED} == {False}
    assert fitted(mixtures) == fitted([row for row in mixtures if row.source != UNTUNED])


def test_a_row_with_experts_in_the_planners_terms(tmp_path: Path) -> None:
    fields = {"hidden": "4096", "vocab": "32000", "tp": "1", "pp": "1", "kv_heads": "8", "sharding": "zero3"}
    ((row,), _) = read_rows(write(tmp_path, **MIXTURE, **fields))
    work, model = row.work, load([str(preset_or_file("mixtral_8x7b", ("model",)))]).model
    norms = (2 * 32 + 1) * 4096
    own, experts = work.parameters(work.share)
    assert work.layers * (own + experts) + 2 * work.vocab * work.width + norms == model_parameters(model).total
    assert work.rank_parameters(work.share) == own + experts / 4
    active = own + experts / 4  # two experts of eight
    assert counted_flops("model causal", replace(work, sequence=0)) == pytest.approx(
        6 * (32 * active + work.vocab * work.width)
    )


@pytest.mark.parametrize(
    ("gpus", "dispatcher", "runs"), [(8, "all_to_all", True), (64, "all_to_all", False), (8, "once", False)]
)
def test_a_configuration_expresses_what_megalite_runs(gpus: int, dispatcher: str, runs: bool, tmp_path: Path) -> None:
    """It sends a row for each expert. FSDP2 pads two experts of a rank for 16 ranks with the same ones."""
    fields = {**MIXTURE, "tp": "1", "pp": "1", "n_gpus": str(gpus), "dispatcher": dispatcher}
    ((row,), _) = read_rows(write(tmp_path, **fields))
    config = expressed(row.work, row.program, row.cluster)
    assert (config is not None) == runs
    if config is not None:
        assert (config.parallel.ep, config.parallel.expert_shards) == (4, 2)
        assert config.model.experts is not None
        assert (config.model.experts.count, config.model.experts.width) == (8, 14336)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "once"])
def test_what_goes_to_experts_on_other_nodes(dispatcher: str, tmp_path: Path) -> None:
    """Two nodes of eight: half of the rows leave, or a token does that has any expert there."""
    fields = {**MIXTURE, "tp": "1", "pp": "1", "experts": "16", "ep": "16", "dispatcher": dispatcher}
    ((row,), _) = read_rows(write(tmp_path, **fields, seq="65536"))
    model = LayerModel(row.work.share, row.program, row.cluster)
    copies = 2 * 8 / 16 if dispatcher == "all_to_all" else (1 - (1 / 2) ** 2)
    rate = row.cluster.network.bandwidth * (ONCE_SHARE if dispatcher == "once" else model.net.constants.network)
    assert model._dispatch() == pytest.approx(2 * copies * 65536 * 4096 * 2 / rate, rel=0.05)


LATENT = {"head_size": "192", "query_rank": "1536", "key_rank": "512", "rotary_width": "64", "value_width": "128"}
V3 = {  # DeepSeek-V3
    **LATENT,
    "model": "DeepSeek-V3",
    "layers": "61",
    "hidden": "7168",
    "heads": "128",
    "kv_heads": "128",
    "ffn": "18432",
    "vocab": "129280",
    "seq": "4096",
    "experts": "256",
    "top_k": "8",
    "expert_ffn": "2048",
    "shared_ffn": "2048",
    "dense_layers": "3",
    "ep": "8",
    "tp": "1",
    "pp": "4",
    "n_gpus": "256",
}


def test_a_row_with_layers_of_two_kinds_in_the_planners_terms(tmp_path: Path) -> None:
    ((row,), _) = read_rows(write(tmp_path, **V3))
    work, model = row.work, load([str(preset_or_file("deepseek_v3", ("model",)))]).model
    counted = sum(sum(work.parameters(share)) for share in work.shares) + 2 * work.vocab * work.width
    norms, corrections = 61 * (2 * 7168 + 1536 + 512) + 7168, 58 * 256
    assert counted + norms + corrections == model_parameters(model).total
    assert [share.passed.active for share in work.shares] == [0] * 3 + [8] * 58
    for convention, counts in (("model causal", "causal"), ("model", "full")):
        told = flops_per_token(model, counts)  # type: ignore[arg-type]
        assert counted_flops(convention, work) == pytest.approx(told, rel=1e-3)
    assert expressed(work, row.program, row.cluster) is None


def test_a_window_is_in_all_layers_but_every_nth(tmp_path: Path) -> None:
    fields = {**MIXTURE, "tp": "1", "pp": "1", "window": "128", "full_every": "2"}
    ((row,), _) = read_rows(write(tmp_path, **fields))
    windows = [heads.scores.window for share in row.work.shares for heads in share.heads]
    assert windows == [128, None] * 16


def test_steps_with_a_layer_for_a_second_token_and_in_rounds(tmp_path: Path) -> None:
    """The layer and its output layer are on the last rank, which has two layers less for them."""
    times = {}
    for fields in ({}, {"predicting": "1"}, {"rounds": "4"}):
        ((row,), _) = read_rows(write(tmp_path, **V3, **fields))
        times[str(fields)] = StepModel(row.work, row.program, row.cluster).step()
        if fields == {"predicting": "1"}:
            assert stage_layers(row.work, row.program) == [15, 16, 16, 14]
    plain, further, rounds = times.values()
    assert plain.pipeline < further.pipeline < 1.1 * plain.pipeline
    assert rounds == replace(plain, bubble=pytest.approx(4 * plain.bubble))


@pytest.mark.parametrize("column", ["rotary_width", "value_width"])
def test_latent_attention_needs_all_its_widths(column: str, tmp_path: Path) -> None:
    rows, (left_out,) = read_rows(write(tmp_path, **{**V3, column: ""}))
    assert not rows
    assert column in left_out


@pytest.mark.parametrize("network", [1.0, 0.1])
def test_a_shared_expert_computes_while_rows_travel(network: float, mixtures: list[Row]) -> None:
    row = next(row for row in mixtures if row.work.ep == 16 and row.program.dispatch == "all_to_all")
    share = replace(row.work.share, sequence=8192)
    experts = cast(ExpertsPart, share.parts[1])
    cluster = replace(row.cluster, network=row.cluster.network.faster(network))
    with_one = replace(experts, kind=replace(experts.kind, shared=SwiGLU(4096)))
    plain, shared = (
        LayerModel(replace(share, parts=(share.parts[0], part)), replace(row.program, dispatch_overlaps=False), cluster)
        for part in (experts, with_one)
    )
    computes = sum(map(shared._of_product[0], shared._shared))
    sent, left = plain._alone[0].experts, shared._alone[0].experts
    both = max(computes, sent) + FITTED_CONSTANTS.overlap * min(computes, sent)
    assert left == pytest.approx(both - computes)
    assert left < sent


def test_overlap_hides_the_shorter_of_both(mixtures: list[Row]) -> None:
    for row in mixtures:
        if not row.program.dispatch_overlaps:
            continue
        plain = replace(row.program, dispatch_overlaps=False)
        hidden, whole = (StepModel(row.work, each, row.cluster).step().total for each in (row.program, plain))
        assert 0.5 * whole < hidden < whole
