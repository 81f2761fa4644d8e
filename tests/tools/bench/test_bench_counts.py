"""`megalite-bench-counts`, and the limits of what it counts. A test that fails here names what a change has added."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.dry_run.run import fake_world
from megalite_kernels import collect_rows, spread_rows, weighted_swiglu
from megalite_kernels.add_rms_norm import bytes_moved as norm_bytes
from megalite_kernels.rope_of_parts import bytes_moved as rope_bytes
from megalite_kernels.routed_rows import bytes_moved as routed_bytes
from megalite_kernels.swiglu import bytes_moved as swiglu_bytes
from megalite_kernels.weighted_swiglu import bytes_moved as weighted_bytes
from megalite_tools.bench import counts
from megalite_tools.bench.compiled_layer import compiled_layers
from megalite_tools.bench.counts import COUNTS, WITH_KERNELS, Count, generated_table, main, page
from megalite_tools.bench.host_calls import calls_per_layer, plain_calls_per_layer
from megalite_tools.bench.layer_bytes import bytes_per_layer
from megalite_tools.bench.moved_bytes import MovedBytes
from megalite_tools.bench.roofline import roofline_table

PAGE = Path("docs/speed.md").read_text(encoding="utf-8")
MADE_WITH = re.search(r"torch (\d+\.\d+)\.", PAGE)
SAME_TORCH = MADE_WITH is not None and torch.__version__.startswith(MADE_WITH[1])


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(0, 2):
        yield


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("row", COUNTS, ids=lambda row: row.name)
def test_a_count_keeps_its_limit_and_is_that_of_the_page(row: Count) -> None:
    count = row.count()
    assert row.limit is None or count <= row.limit
    found = re.search(rf"^\| {re.escape(row.name)} \| ([\d,.]+) \|", PAGE, re.MULTILINE)
    assert found is not None
    written = float(found[1].replace(",", ""))
    if SAME_TORCH:  # with another, the host makes fewer or more calls
        assert count == pytest.approx(written, rel=0.1), "make the page again"


@pytest.mark.usefixtures("world")
def test_calls_are_counted_exactly_and_by_where_they_come_from() -> None:
    found = calls_per_layer("fp32")
    assert found == calls_per_layer("fp32")
    assert found["megalite.model.decoder.Layer.forward"] > 0
    assert found["megalite_kernels.adamw.FusedAdamW.states_of"] > 0
    assert plain_calls_per_layer().total() < found.total()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("biases", [False, True])
def test_bytes_of_a_layer_are_those_that_its_kernels_declare(biases: bool) -> None:
    """Products add to nothing in memory: one makes queries, keys and values with their biases, one gate and up, and one
    each their gradients. The sum of gradients, for biases, reads them once."""
    found = bytes_per_layer("llama3_8b", f"model.qkv_bias={biases}")
    half, width, hidden, heads, values = torch.bfloat16, 4096, 14336, (32 + 2 * 8) * 128, 8 * 128
    tables, statistic = 2 * 64 * 4, 4
    norms = [2 * (moved + statistic) for moved in norm_bytes(1, width, half)]
    turns, back = (moved + tables for moved in rope_bytes(1, heads, half, values))
    declared = (("add_rms_norm", norms), ("swiglu", swiglu_bytes(1, hidden, half)))
    expected = {
        name + after: size for name, sizes in declared for after, size in zip(("", "_backward"), sizes, strict=True)
    }
    expected |= {"rope_of_parts_in_place": turns, "rope_of_parts_backward": back}
    assert found == expected | ({"sum": heads * half.itemsize} if biases else {})


def test_bytes_of_experts_rows_are_those_that_their_kernels_declare() -> None:
    tokens, choices, width, hidden, half = 12, 3, 8, 6, torch.bfloat16
    sizes = (tokens, width), (tokens * choices, hidden), (tokens * choices, hidden)
    x, gate, up = (torch.empty(*size, dtype=half, device="meta", requires_grad=True) for size in sizes)
    scores = torch.empty(tokens * choices, device="meta", requires_grad=True)
    places = torch.empty(tokens, choices, dtype=torch.int64, device="meta")
    with MovedBytes(lambda name, tensor: True) as moved:
        rows = spread_rows(x, places, "triton")
        made = weighted_swiglu(gate, up, scores, "triton"), collect_rows(rows, places, "triton")
        torch.autograd.grad(made, (x, gate, up, scores), [torch.empty_like(each) for each in made])
    routed, there = routed_bytes(tokens, choices, width, half), weighted_bytes(tokens * choices, hidden, half)
    names = "weighted_swiglu", "weighted_swiglu_backward", "spread_rows", "collect_rows"
    assert +moved.bytes == dict(zip(names, (*there, sum(routed), sum(routed)), strict=True))


def test_kernels_that_the_compiler_makes_are_those_of_the_page() -> None:
    """Names, architectures, launches and bytes; the version of Triton decides about registers."""
    found = re.findall(r"^\| (forward|backward) \| (`\w+`) \| (\d+) \| (\d+) \| ([\d,]+) \|", PAGE, re.MULTILINE)
    assert [tuple(map(str, row[:5])) for row in generated_table()] == found
    kernels = [kernel for layer in compiled_layers(WITH_KERNELS) for kernel in layer.kernels]
    assert {kernel.architecture for kernel in kernels} == {90, 100}
    assert all(kernel.sizes and kernel.registers for kernel in kernels)


@pytest.mark.usefixtures("world")
def test_the_bound_on_one_gpu_is_that_of_the_page() -> None:
    for row in roofline_table():
        assert f"| {' | '.join(row)} |\n" in PAGE


def test_a_count_above_its_limit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Count("some", lambda: 1000, 1000), Count("others", lambda: 7, None))
    monkeypatch.setattr(counts, "COUNTS", rows)
    monkeypatch.setattr(counts, "generated_table", lambda: [("forward", "kernel", 90)])
    monkeypatch.setattr(counts, "roofline_table", lambda: [("model", "1 ms")])
    out = tmp_path / "page.md"
    assert main(["--write", str(out)]) == 0
    assert "| some | 1,000 | 1,000 |\n| others | 7 |  |\n" in out.read_text()
    assert out.read_text() == page([1000, 7], [("forward", "kernel", 90)], [("model", "1 ms")])
    monkeypatch.setattr(counts, "COUNTS", (Count("some", lambda: 1001, 1000), rows[1]))
    assert main([]) == 1
    monkeypatch.setitem(counts.ORIGINS, "fp32", lambda: Counter({"megalite.a": 2, "megalite.b": 3}))
    capsys.readouterr()
    assert main(["--origins", "fp32"]) == 0
    assert re.search(r"megalite.b +3 *\n.*megalite.a +2 *\n.*all +5 *\n", capsys.readouterr().out)


def test_limits_are_those_of_the_page() -> None:
    for row in COUNTS:
        limit = "" if row.limit is None else f"{row.limit:,.9g}"
        assert re.search(rf"^\| {re.escape(row.name)} \| [\d,.]+ \| {limit} \|$", PAGE, re.MULTILINE)
