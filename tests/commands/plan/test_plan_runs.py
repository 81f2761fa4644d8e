"""`megalite plan --tokens`: the batch, the numbers of GPUs that are tried, and intervals of days and costs."""

import re
from collections.abc import Callable
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.commands.plan.amounts import gpu_counts
from megalite.commands.plan.global_batch import usual_batch

MODEL = "configs/model/llama3.2_1b.yaml"
SMALL = [MODEL, "batch.global=16", "parallel.pp=1"]  # few layouts
Run = Callable[..., str]
INTERVAL = r"([\d.,]+) \(([\d.,]+) – ([\d.,]+)\)"


def test_days_and_costs_have_intervals(plan: Run) -> None:
    output = plan(*SMALL, "--gpus", "8", "--tokens", "1T", "--top", "1")
    found = re.search(rf"{INTERVAL} +[\d,]+ +\$", output)
    assert found
    middle, low, high = (float(each.replace(",", "")) for each in found.groups())
    assert (middle / low, high / middle) == (pytest.approx(1.13, rel=0.01), pytest.approx(1.13, rel=0.01))
    assert re.search(r"\$[\d,]+ \(\$[\d,]+ – \$[\d,]+\)", output)


def test_a_batch_is_chosen_for_tokens_and_told(plan: Run, tmp_path: Path) -> None:
    told = plan(MODEL, "--gpus", "8", "--tokens", "1T", "--top", "1")
    assert "batch.global is not given, so it is 512 sequences" in told
    assert "512 sequences of 8,192 tokens a step" in told
    other = tmp_path / "other.yaml"
    other.write_text(f"include: {Path(MODEL).absolute()}\nbatch: {{global: 64}}\n")
    for arguments in ([MODEL, "batch.global=64"], [str(other)]):
        told = plan(*arguments, "--gpus", "8", "--tokens", "1T", "--top", "1")
        assert "is not given" not in told
        assert "64 sequences of 8,192 tokens a step" in told
    assert "is not given" not in plan(*SMALL, "--gpus", "8", "--top", "1", "batch.global=8")
    told = plan(MODEL, "--gpus", "8", "--tokens", "1T", "--as-is", "parallel.dp_shard=8", "batch.micro=1")
    assert "batch.global is not given, so it is 8 sequences, 65.5 k tokens: the default. batch.global=N" in told


@given(st.floats(1e6, 1e15), st.floats(1e6, 1e15), st.integers(16, 1 << 17))
def test_batches_are_powers_of_two_near_step_laws_and_grow_with_tokens(some: float, more: float, sequence: int) -> None:
    batch, best = usual_batch(some, sequence), 0.58 * some**0.571 / sequence
    assert batch & (batch - 1) == 0
    assert batch == 1 or best / 1.42 <= batch <= best * 1.42
    assert (usual_batch(more, sequence) >= batch) if more >= some else (usual_batch(more, sequence) <= batch)


@given(st.floats(1e9, 1e15), st.integers(16, 1 << 14), st.lists(st.integers(1, 200), max_size=3))
def test_batches_are_shared_evenly_by_the_numbers_of_gpus(tokens: float, sequence: int, gpus: list[int]) -> None:
    batch, best = usual_batch(tokens, sequence, gpus), 0.58 * tokens**0.571 / sequence
    assert batch == 1 or best / 1.42 <= batch <= best * 1.42
    if best > 1.42 * lcm(*gpus):
        assert not any(batch % count for count in gpus)


def test_a_batch_is_chosen_for_the_numbers_of_gpus(plan: Run) -> None:
    told = plan(MODEL, "--gpus", "100", "--tokens", "1T", "--top", "1")
    assert "so it is 400 sequences, 3.28 M tokens: 25 times a power of two, which these GPUs can share evenly" in told


def test_one_number_of_gpus_can_have_limits(plan: Run) -> None:
    arguments = (MODEL, "--gpus", "64", "--tokens", "100B")
    told = plan(*arguments, "--days", "30")
    assert "The cheapest that keeps the limits: 64 GPUs" in told
    assert "passes a limit" not in told
    assert "The interval of its prediction passes a limit." in plan(*arguments, "--days", "0.39")
    assert "No number of GPUs here keeps the limits" in plan(*arguments, "--budget", "100")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8-64", [8, 16, 24, 32, 48, 64]),
        ("64-512", [64, 96, 128, 192, 256, 384, 512]),
        ("2-8", [2, 4, 8]),
        ("16-20", [16, 20]),
        ("17-40", [17, 34, 40]),
        ("64", [64]),
        ("48,32,48", [32, 48]),
        ("8-24", [8, 16, 24]),
        ("8-8", [8]),
    ],
)
def test_numbers_of_gpus_are_one_some_or_a_range(text: str, counts: list[int]) -> None:
    assert gpu_counts(text) == counts


def test_the_plain_name_of_a_gpu_is_its_usual_cluster(plan: Run) -> None:
    for name, found in (("h100", "h100_sxm"), ("H100", "h100_sxm"), ("a100", "a100_80gb")):
        assert f"({found})" in plan(*SMALL, "--gpus", "8", "--top", "1", "--cluster", name)


def test_an_exhaustive_search_shows_as_many_rows_as_are_asked_for(plan: Run) -> None:
    pins = ("parallel.pp=1", "parallel.cp=1", "parallel.tp=1", "train.recompute=none")
    output = plan(*SMALL, *pins, "--gpus", "8", "--top", "2", "--exhaustive")
    assert len(re.findall(r"^\d+  ", output, flags=re.MULTILINE)) == 2
