"""Published runs as configurations of megalite: which can be expressed, and that both ways of timing them agree."""

from dataclasses import replace

import pytest
from published_cases import LLAMA3_8B

from megalite.config.layers import layer_kinds
from megalite.config.rules.validate import validate
from megalite.cost.cluster import load_cluster
from megalite.cost.predict import predict
from megalite.cost.program import MEGALITE
from megalite.cost.share import share_of
from megalite.cost.stages import Timer
from megalite_tools.plan.published.as_configuration import expressed
from megalite_tools.plan.published.profiles import PROFILES, Profile
from megalite_tools.plan.published.score import Compared, by_formula, planned, score
from megalite_tools.plan.published.step import StepModel
from megalite_tools.plan.published.work import Work

H100 = load_cluster("h100_sxm")
PLAIN = replace(LLAMA3_8B, tp=1, pp=2, dp=16, shards=8, micro=1, micro_batches=8, recompute="full")
TITAN = PROFILES["torchtitan"]


def test_a_configuration_has_all_that_a_row_tells() -> None:
    config = expressed(PLAIN, TITAN, H100)
    assert config is not None
    assert share_of(config, layer_kinds(config.model)[0]) == replace(PLAIN, recompute="none").share
    assert (config.model.layers, config.model.tie_embeddings) == (PLAIN.layers, PLAIN.tied)
    layout = config.parallel.layout
    assert (layout.pp, layout.dp_shard, layout.dp_replicate, layout.world_size) == (2, 8, 2, 32)
    assert (config.batch.global_, config.parallel.data.mode, config.train.recompute) == (128, "zero3", "full")
    assert (config.parallel.pipeline.split, config.parallel.data.reduce_precision) == ([16, 16], "fp32")
    assert not validate(config, 32)


def test_a_pipeline_has_the_layers_of_the_program() -> None:
    interleaved = expressed(replace(PLAIN, virtual=4), TITAN, H100)
    assert interleaved is not None
    assert (interleaved.parallel.pipeline.schedule, interleaved.parallel.pipeline.split) == (
        "interleaved_1f1b",
        [4] * 8,
    )
    fewer_at_the_ends = expressed(replace(PLAIN, layers=30, pp=4, dp=8), TITAN, H100)
    assert fewer_at_the_ends is not None
    assert fewer_at_the_ends.parallel.pipeline.split == [7, 8, 8, 7]


@pytest.mark.parametrize(
    ("work", "program"),
    [
        (replace(PLAIN, gated=False), TITAN),
        (replace(PLAIN, precision="fp8"), TITAN),
        (PLAIN, replace(TITAN, attention="unfused")),
        (PLAIN, replace(TITAN, waits=0.01)),  # waits of a host
        (replace(PLAIN, tp=8, dp=8, shards=None), replace(TITAN, hidden=0.8)),
        (replace(PLAIN, mode="zero1", micro_batches=1, dp=256, shards=None), replace(TITAN, pieces=9)),
        (replace(PLAIN, layers=20, pp=20, virtual=2), TITAN),  # a stage without layers
    ],
)
def test_what_no_configuration_does_is_left_to_the_formula(work: Work, program: Profile) -> None:
    assert expressed(work, program, H100) is None


def test_a_programs_kernels_are_timed() -> None:
    config = expressed(PLAIN, TITAN, H100)
    assert config is not None
    slow, fast = (predict(config, H100, Timer(H100, program=program)) for program in (TITAN, MEGALITE))
    assert slow.parts["passes"] > 2 * fast.parts["passes"]
    assert predict(config, H100).seconds == fast.seconds
    more = Timer(H100, program=replace(MEGALITE, optimizer=2 * MEGALITE.optimizer))
    assert predict(config, H100, more).parts["optimizer"] == pytest.approx(2 * fast.parts["optimizer"])


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("pp", "virtual", "tp"), [(1, 1, 1), (2, 1, 2), (4, 2, 1), (1, 1, 8)])
def test_one_profile_takes_as_long_both_ways(mode: str, pp: int, virtual: int, tp: int) -> None:
    work = replace(PLAIN, mode=mode, pp=pp, virtual=virtual, tp=tp, dp=32 // (pp * tp), shards=None, vocab=32768)
    program = replace(TITAN, rearranges=False)
    config = expressed(work, program, H100)
    if config is None:  # FSDP2's copies are not what other modes have
        program = replace(program, moved=(0, 0), sums=10, reduces_beside=True, gathers_beside=True, scatters=True)
        config = expressed(work, program, H100)
    assert config is not None
    formula = StepModel(work, program, H100).step().total
    assert predict(config, H100, Timer(H100, program=program)).seconds == pytest.approx(formula, rel=0.06)


def test_runs_that_a_configuration_expresses_are_predicted_as_well_as_the_documentation_says(
    times: list[Compared],
) -> None:
    found = planned(times)
    through, formula = score(found), score(by_formula(found))
    assert through is not None
    assert formula is not None
    assert through.rows == formula.rows > 130
    assert through.mean_abs_error < 0.065
    assert through.p90 < 0.12
    assert abs(through.mean_abs_error - formula.mean_abs_error) < 0.005
    assert {each.row.program.name for each in found} >= {"torchtitan", "fms-fsdp", "nanotron", "an unknown program"}
    assert all(abs(each.predicted / each.formula - 1) < 0.06 for each in found if each.formula)
