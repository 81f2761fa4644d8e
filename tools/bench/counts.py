"""Costs of a training step as counts that need no GPU and depend on no load: the page docs/speed.md.

Each count has a limit, which a test keeps (tests/tools/bench/test_bench_counts.py). Where code gets better, lower the
limit; --write makes the page again.
"""

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megalite.base.entry import exit_code
from megalite.base.exit_codes import ExitCode
from megalite.base.files import write_whole
from megalite.dry_run.run import fake_world
from megalite_kernels.adamw import bytes_moved as adamw_bytes
from megalite_kernels.muon import bytes_moved as muon_bytes
from megalite_launch.base.texts import markdown_table
from megalite_tools.bench.compiled_layer import ARCHITECTURES, TOKENS, CompiledLayer, compiled_layers
from megalite_tools.bench.host_calls import DEEP, SHALLOW, calls_per_layer, plain_calls_per_layer
from megalite_tools.bench.layer_bytes import bytes_per_layer, operations_per_layer
from megalite_tools.bench.roofline import ASSUMED_RATES, GPU, roofline_table
from megalite_tools.bench.step_counts import (
    columns_outside_tiles,
    exposed_collectives,
    exposed_compiled_collectives,
    graphs_of_a_layer,
    staged_bytes,
)
from megalite_tools.terminal import Terminal

COMMAND = "megalite-bench-counts"
PRESET = "llama3_8b"
WITH_KERNELS = "qwen3_8b"  # in a compiled layer of it, the compiler makes some
ORIGINS: dict[str, Callable[[], Counter[str]]] = {
    "plain": plain_calls_per_layer,
    "fp32": partial(calls_per_layer, "fp32"),
    "bf16": partial(calls_per_layer, "bf16"),
    "bytes": partial(bytes_per_layer, PRESET),
}
PAGE = """\
# Speed, in counts

These numbers decide how fast a step can be, and a CPU counts them exactly. This page is made by
`{command} --write docs/speed.md`; tests keep the limits. [benchmarks.md](benchmarks.md) has times.

{table}
Calls are those of functions in Python and C that `sys.setprofile` sees in a step of a model of width 64 with 1 × 32
tokens on one rank, per layer: the difference of {deep} and {shallow} layers. The host makes them while a GPU computes;
where they take longer than a layer's kernels, the GPU waits. `{command} --origins fp32` lists where they
come from. With CUDA graphs (`train.cuda_graph`) those of the update are left, whatever the number of micro-batches.

Staged are tensors as large as a weight matrix that anything but a matrix product reads or writes, for each micro-batch,
in bf16 on one rank with products that add to float32 sums (36 bytes per parameter under FSDP2). Optimizers' bytes are
those of a step, with the bf16 copy of each weight. A layer under tensor parallelism gathers and scatters its whole
input ten times, compiled eight times; a collective is exposed where no matrix product is started between it and the
wait for it, in a compiled layer by the order of its graph. With symmetric memory (`parallel.tensor.overlap`), products
and collectives are one operation, but for two in backward of a compiled layer, whose products are summed first. A break
in the graph of a compiled layer is an error. Tiles are the 128 columns to which a vocabulary is padded
(`model.vocab_size` in [configuration.md](configuration.md#model)).

Bytes are those that kernels beside matrix products and attention read and write for a token in a layer of Llama 3 8B,
forward and backward, with bf16 copies of parameters on one data-parallel rank, every tensor once for each kernel. A
product counts with a sum that it adds to in place, not with a bias. `{command} --origins bytes` lists the
operations.

An operation is a kernel, or two where one of megalite's sums parts after it. An eager layer has 15 matrix products,
as one takes q, k and v, and one gate and up, and 9 copies of gradients into their sums, 7 of which products save on a
GPU; attention's two are not among its operations. A compiled layer has those, and 12 products, as one makes the
gradients of all weights that share an input; these are added to their sums outside of its graphs.

Tests alone keep: 0 synchronisations in a step whose values are logged every step (`tests/cuda`), and bytes around the
kernels of attention for documents (`tests/parallel/test_packed.py`). `kernels/compile_report.md` has registers, spills
and loads of each kernel for three generations of GPUs.

## Kernels that the compiler makes

With `train.compile`, PyTorch's compiler makes kernels of what is between megalite's own. In the layer above, nothing
is. These are of a layer of Qwen3 8B, for {tokens:,} tokens, in which q and k have norms, which keep what they take: so
q, k and v are products of their own, whose three gradients of the input are added. No GPU is needed: the compiler is
told of one, and what it writes is compiled for it, with every size of its programs of which a run takes the fastest.
Registers and bytes of spilled registers are the most of any size.

{generated}
## A bound on one H100

A prediction, from counts: matrix products, attention and passes over memory one after another, at rates that are
assumed, and nothing waits. One micro-batch in a step, bf16, one rank; the shares are of {peak:g} TFLOP/s, with
attention counted in full / as the causal half.

{roofline}
Assumed are {products} TFLOP/s for matrix products of widths {widths}, {head:g} for the head, {memory:g} TB/s for
passes over memory, and for attention the planner's shares of the peak. The goals were set for that with
FlashAttention 3, which a run takes where it is installed. Measured is one H200 with cuDNN's attention ([its
record](benchmarks/gpu/h200_2026_11_26/README.md)), whose memory is faster, and which reaches 693 TFLOP/s in products
at its power limit: so the widths of 8B stay below what is assumed. NVIDIA publishes 59.4 / 52.8 for Llama 3.1 8B on 8
H100 (NeMo 24.09, CP 2, 32 micro-batches in a step, which leave less to the optimizer).

Python {python}, torch {torch}.
"""


GENERATED = (
    "pass", "kernel", "sm", "launches", "bytes per token and launch", "sizes", "registers", "spilled bytes",
)  # fmt: skip
ROOFLINE = (
    "tokens of a step", "ms, cuDNN", "MFU, cuDNN", "ms, FlashAttention 3", "MFU, FlashAttention 3", "goal",
    "measured, H200",
)  # fmt: skip


def _compiled_layer() -> CompiledLayer:
    (layer,) = compiled_layers(PRESET, ARCHITECTURES[:1])
    return layer


@dataclass(frozen=True)
class Count:
    """One row of the page."""

    name: str
    count: Callable[[], float]
    limit: float | None  # None: something of others, to compare with


COUNTS = (
    Count("calls per layer, fp32", lambda: calls_per_layer("fp32").total(), 930),
    Count("calls per layer, bf16", lambda: calls_per_layer("bf16").total(), 935),
    Count("calls per layer, bf16, micro-batches as CUDA graphs", lambda: calls_per_layer("bf16", True).total(), 100),
    Count("the same model as plain modules in fp32, fused AdamW", lambda: plain_calls_per_layer().total(), None),
    Count("staged bytes per parameter and micro-batch", lambda: staged_bytes()[0], 0),
    Count("bytes per parameter, AdamW", lambda: adamw_bytes(1, copy=torch.bfloat16)[0], 30),
    Count("bytes per parameter, passes of Muon", lambda: muon_bytes(1, copy=torch.bfloat16)[0], 28),
    Count("exposed collectives per layer, tensor parallel", lambda: exposed_collectives()[0], 2),
    Count("the same with symmetric memory", lambda: exposed_collectives(symmetric=True)[0], 0),
    Count("exposed collectives per compiled layer, tensor parallel", lambda: exposed_compiled_collectives()[0], 8),
    Count("the same compiled with symmetric memory", lambda: exposed_compiled_collectives()[1], 2),
    Count("graphs per compiled layer, tensor parallel", graphs_of_a_layer, 1),
    Count("columns of the head outside of tiles, 50,257 tokens", columns_outside_tiles, 0),
    Count("bytes per token and layer, 8B in bf16", lambda: bytes_per_layer(PRESET).total(), 406_600),
    Count(
        "bytes per token and layer, with biases of q, k and v",
        lambda: bytes_per_layer(PRESET, "model.qkv_bias=true").total(),
        418_900,
    ),
    Count("operations per layer, 8B in bf16", lambda: operations_per_layer(PRESET).total(), 32),
    Count("operations of a compiled layer", lambda: _compiled_layer().launches.total(), 22),
    Count(
        "of these, kernels that the compiler makes",
        lambda: sum(kernel.launches for kernel in _compiled_layer().kernels),
        0,
    ),
    Count("bytes per token of a compiled layer", lambda: _compiled_layer().bytes, 406_600),
    Count(
        "spilled bytes of the compiler's kernels",
        lambda: sum(kernel.spilled for layer in compiled_layers(WITH_KERNELS) for kernel in layer.kernels),
        0,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code, which is FAILED where a count exceeds its limit."""
    return exit_code(COMMAND, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    terminal = Terminal()
    with fake_world(0, 2):
        if options.origins:
            found = ORIGINS[options.origins]()
            rows = [(origin, f"{count:,}") for origin, count in found.most_common()]
            terminal.table(("origin:", "per layer"), [*rows, ("all", f"{found.total():,}")])
            return ExitCode.DONE
        counted = [row.count() for row in COUNTS]
        generated, roofline = (generated_table(), roofline_table()) if options.write else ([], [])
    exceeding = [at for at, row in enumerate(COUNTS) if row.limit is not None and counted[at] > row.limit]
    terminal.table(("count:", "found", "limit"), table(counted), exceeding)
    if options.write:
        write_whole(Path(options.write), page(counted, generated, roofline))
    return ExitCode.FAILED if exceeding else ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--write", metavar="FILE", help="page to write, in Markdown")
    parser.add_argument(
        "--origins", choices=ORIGINS, help="list what makes calls or moves bytes, and count nothing else"
    )
    return parser


def table(counted: Sequence[float]) -> list[tuple[str, str, str]]:
    """The rows of the page: names, counts and limits."""
    return [
        (row.name, f"{count:,.9g}", "" if row.limit is None else f"{row.limit:,.9g}")
        for row, count in zip(COUNTS, counted, strict=True)
    ]


def generated_table() -> list[tuple[object, ...]]:
    """Rows of the page about the compiler's kernels."""
    return [
        (kernel.part, f"`{kernel.name}`", kernel.architecture, kernel.launches, f"{kernel.bytes:,.0f}", *kernel.needs)
        for layer in compiled_layers(WITH_KERNELS)
        for kernel in layer.kernels
    ]


def page(counted: Sequence[float], generated: Sequence[Sequence[object]], roofline: Sequence[Sequence[object]]) -> str:
    """The whole page."""
    products = ASSUMED_RATES.products
    return PAGE.format(
        command=COMMAND,
        table=markdown_table(("", "found", "limit"), table(counted)),
        deep=DEEP,
        shallow=SHALLOW,
        tokens=TOKENS,
        generated=markdown_table(GENERATED, generated),
        peak=GPU.peak["bf16"] / 1e12,
        roofline=markdown_table(ROOFLINE, roofline),
        products=", ".join(f"{rate / 1e12:g}" for rate in products.values()),
        widths=", ".join(f"{width:,}" for width in products),
        head=ASSUMED_RATES.head / 1e12,
        memory=ASSUMED_RATES.memory / 1e12,
        python=platform.python_version(),
        torch=torch.__version__.partition("+")[0],
    )


if __name__ == "__main__":
    sys.exit(main())
