"""The self-check: its tables, and how it ends."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from traffic_cases import SIZES, TP, configured, data, pipeline

from megalite.base.errors import InputError
from megalite.base.exit_codes import ExitCode
from megalite.commands import selfcheck
from megalite.config.schema import Config
from megalite.dry_run.configuration import as_counted, busiest_rank
from megalite.plan.memory.held import HOST_MEMORY
from megalite.plan.memory.peak import Memory, rank_memory
from megalite.plan.resolved import resolve
from megalite.plan.traffic.step import step_traffic

OVERRIDES = {**{f"model.{key}": value for key, value in SIZES.items()}, **TP, **pipeline("1f1b", pp=3, layers=3)}
OVERRIDES |= {**data("zero2", dp_shard=2), "batch.global": 6}


def arguments() -> Namespace:
    return Namespace(files=[], overrides=[f"{key}={value}" for key, value in OVERRIDES.items()], world_size=None)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """What dry runs of the pipeline ranks answer: what is predicted, until a test changes it."""
    config = as_counted(configured(OVERRIDES))
    found = {pp: _as_predicted(config, rank_memory(config, pp)) for pp in range(3)}
    monkeypatch.setattr(selfcheck, "dry_run", lambda args, config, memory, *_: found[memory.pp])
    return found


def _as_predicted(config: Config, memory: Memory) -> dict[str, Any]:
    kinds = {kind: sum(memory.of(kind).values()) for kind in (*{kind for kind, _ in memory.bytes},)}
    traffic = step_traffic(resolve(config), busiest_rank(config, memory.pp), 3)
    return {
        "bytes": kinds,
        "doing": "B(stage 0, micro-batch 1)",
        "transfers": [[*each.transfer, each.times] for each in _merged(traffic)],
        "micro_batches": 3,
    }


def _merged(traffic: list[Any]) -> list[Any]:
    """As a dry run counts: without purposes, so equal transfers are one."""
    found: dict[Any, Any] = {}
    for each in traffic:
        before = found.get(each.transfer)
        found[each.transfer] = each if before is None else replace(before, times=before.times + each.times)
    return list(found.values())


def test_a_dry_run_of_the_real_code_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.run(arguments(), [1]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "passed: memory within 1%, traffic equal transfer by transfer." in out
    assert "Memory of pipeline rank 1 (rank 4)" in out
    assert "micro-batch" in out.partition("Peak predicted:")[2].partition("\n")[0]
    assert "stage 1, micro-batch" in out.partition("Peak counted:")[2].partition("\n")[0]
    assert "gradients: partial sums of norms" in out
    assert "differ" not in out.partition("Traffic")[2]


def test_first_last_and_fullest_are_checked(
    answers: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert selfcheck.run(arguments()) == ExitCode.DONE
    out = capsys.readouterr().out
    assert [f"Memory of pipeline rank {pp}" in out for pp in range(3)] == [True, False, True]
    assert selfcheck.run(arguments(), [0, 1, 2]) == ExitCode.DONE
    assert "Memory of pipeline rank 1" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["activations", HOST_MEMORY])
@pytest.mark.parametrize(("share", "code"), [(1.5, ExitCode.FAILED), (1.0001, ExitCode.DONE)])
def test_memory_may_be_off_by_one_percent(
    answers: dict[int, dict[str, Any]], kind: str, share: float, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    answers[2]["bytes"][kind] *= share
    assert selfcheck.run(arguments()) == code
    failed = "failed: memory is off by more than 1% on pipeline rank 2."
    assert (failed in capsys.readouterr().out) == (code == ExitCode.FAILED)


def test_one_more_transfer_is_a_difference(
    answers: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    answers[0]["transfers"] += [["all_reduce", "tp", 4096, "bfloat16", 3]]
    answers[0]["transfers"][0][-1] -= 1
    assert selfcheck.run(arguments()) == ExitCode.FAILED
    out = capsys.readouterr().out
    assert "failed: traffic differs on pipeline rank 0." in out
    rows = [line.split() for line in out.partition("that differ")[2].partition("Memory")[0].splitlines()]
    assert ["tp:", "all_reduce", "4,096", "bfloat16", "0", "3"] in rows
    assert len([row for row in rows if row and row[-1].isdigit()]) == 2


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match=r"pipeline rank 3 and 9: there is none; parallel\.pp has ranks 0 to 2"):
        selfcheck.run(arguments(), [3, 0, 9])
