"""Bytes, collectives and graphs of a step, beside the rows that `test_bench_counts` keeps."""

from collections.abc import Iterator

import pytest
from torch.distributed.fsdp import FSDPModule

from megalite.dry_run.run import fake_world
from megalite_tools.bench.step_counts import exposed_collectives, graphs_of_a_layer, staged_bytes


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(0, 2):
        yield


def test_collectives_are_all_seen_and_six_are_exposed_without_pieces() -> None:
    assert exposed_collectives(1 << 40) == (6, 10)
    assert exposed_collectives()[1] == exposed_collectives(symmetric=True)[1] == 10


NORMED = "model.qk_norm=true", "model.qkv_bias=true"
POST = "model.norm=post", "model.qk_norm=true", "model.qk_norm_width=all"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("lengths", "settings"),
    [((64, 32, 16), ()), ((64,), NORMED), ((64,), POST)],
    ids=["lengths", "norms of heads", "norms of all heads"],
)
def test_a_layer_is_one_graph_for_each_length(lengths: tuple[int, ...], settings: tuple[str, ...]) -> None:
    """None is one of symbolic sizes."""
    assert graphs_of_a_layer(lengths, *settings) == len(lengths)


def test_no_byte_is_staged_in_split_backward_passes_and_many_are_under_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers, casts, accumulates and reduces; on one rank it is not told to divide, which would be a pass."""
    divided: list[float] = []
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, factor: divided.append(factor))
    assert staged_bytes("parallel.pipeline.schedule=zb_h1") == (0, {})
    found, by = staged_bytes("parallel.data.mode=zero3")
    assert found > 20
    assert by["_to_copy"] > 0
    assert divided == []
