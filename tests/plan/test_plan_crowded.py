"""Memory of a rank to whose experts all tokens go."""

import pytest

from megalite.config.load import load
from megalite.config.rules.validate import check
from megalite.plan.memory.peak import crowded, rank_memory


@pytest.mark.parametrize(("ep", "times"), [(1, 1), (2, 2), (4, 4), (8, 8 / 2)])
def test_rows_of_all_ranks_come_to_one(ep: int, times: float) -> None:
    """Two experts compute a token: with ep 8 a rank has one of eight, and a token can choose it once."""
    keys = ["parallel.dp_shard=8", f"parallel.ep={ep}", "batch.global=8", "batch.micro=1", "run.device=cuda"]
    config = check(load(["configs/model/mixtral_8x7b.yaml"], [*keys, "model.layers=2"]), 8)
    memory = rank_memory(config, 0)
    rows = memory.of("activations")["mlp"] + memory.of("temporaries").get("mlp", 0)
    assert crowded(config, memory) == pytest.approx(memory.total + (times - 1) * rows, abs=1)


def test_buffers_of_a_fixed_size_have_room_for_all() -> None:
    keys = ["parallel.dp_shard=8", "parallel.ep=4", "parallel.experts.buffers=worst_case", "batch.global=8"]
    config = check(load(["configs/model/mixtral_8x7b.yaml"], [*keys, "run.device=cuda", "model.layers=2"]), 8)
    memory = rank_memory(config, 0)
    assert crowded(config, memory) == memory.total
