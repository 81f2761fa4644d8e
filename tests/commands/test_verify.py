import importlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import verify_faults as faults
from ranks import Ranks
from rich.console import Console
from toy_jobs import one_rank
from warm_start import run

from megalite.base.errors import InputError
from megalite.commands import main
from megalite.commands.verify import Difference, RankPart, Trace, _differences, _distance, compare, refuse_dead, show
from megalite.commands.verify_copy import not_compared, shrink
from megalite.config.layers import layer_kinds
from megalite.config.layout import Layout, vocabulary_rows
from megalite.config.load import load
from megalite.config.model_schema import Adapter, Attention, Base, Experts, Model, RopeScaling
from megalite.config.parallel_schema import Parallel, Pipeline
from megalite.config.rules.validate import check, validate
from megalite.config.schema import Batch, Config, Curriculum, Kernels, Optim, Rampup, Train
from megalite.distributed.mesh import Mesh
from megalite.plan.batches import GlobalBatch, global_batches
from megalite.plan.pipeline import table_of
from megalite.plan.resolved import resolve

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs" / "model").glob("*.yaml"))


def configuration(tied: bool = False, clip_norm: float = 0.0, **degrees: int) -> Config:
    return Config(
        model=Model(2, 16, 4, 2, None, 16, 32, 8, tie_embeddings=tied, qk_norm=True),
        parallel=Parallel(**{"dp_shard": 1, **degrees}),
        batch=Batch(1, 4),
        train=Train(steps=3, precision="fp64"),
        optim=Optim(clip_norm=clip_norm),
    )


SOUND = [
    TENSOR := configuration(tp=2),
    SHARDED := configuration(dp_shard=2),
    REPLICATED := configuration(dp_replicate=2),
    STAGES := configuration(pp=2),
    TIED := configuration(pp=2, tied=True),
    CLIPPED := configuration(pp=2, clip_norm=0.01),
    GROWING := shrink(
        replace(configuration(pp=2), batch=Batch(1, 8, None, Rampup(2, None, 10**6), Curriculum(2, 10**6)))
    ),
    ADAPTED := replace(configuration(tp=2), adapter=Adapter(2, 4.0, dropout=0.2)),
    MIXED := shrink(
        replace(configuration(pp=2), train=Train(steps=3, precision="fp64", recompute="budget", recompute_budget=1.0))
    ),
]
ORDERED = [  # by `auto`: unequal stages; a V with memory for a single micro-batch
    shrink(
        replace(
            configuration(pp=2),
            model=replace(STAGES.model, layers=4),
            batch=Batch(1, 5),
            parallel=Parallel(2, dp_shard=1, pipeline=pipeline),
        )
    )
    for pipeline in (Pipeline("auto", split=[1, 3]), Pipeline("auto", 2, memory=2e-5))
]
EVERYTHING = {"loss", "gradient norm", "gradients", "weights after 3 steps"}


@pytest.mark.parametrize(
    ("fault", "config", "differing", "where"),
    [
        (faults.reduce_scatter_that_does_not_sum, TENSOR, EVERYTHING, ""),
        (faults.gather_in_the_wrong_order, TENSOR, EVERYTHING, ""),
        (faults.tied_gradients_not_summed, TIED, EVERYTHING, "embed.weight"),
        (faults.partial_gradients_taken_for_whole, TENSOR, EVERYTHING, "norm.weight"),
        (faults.gradients_averaged, SHARDED, EVERYTHING, ""),
        (faults.gradients_averaged, REPLICATED, EVERYTHING, ""),
        (faults.micro_batch_sent_twice, STAGES, EVERYTHING, ""),
        (faults.last_micro_batch_without_backward, STAGES, EVERYTHING, ""),
        (faults.replicas_counted_in_the_norm, TENSOR, {"gradient norm"}, ""),
        (faults.replicas_counted_in_the_norm, REPLICATED, {"gradient norm"}, ""),
        (faults.seed_that_depends_on_the_rank, STAGES, {*EVERYTHING, "initial weights"}, ""),
        (
            faults.rank_that_does_not_clip,
            CLIPPED,
            {"loss", "gradient norm", "weights after 3 steps"},
            "",
        ),
        (faults.loss_of_one_rank_not_counted, SHARDED, {"loss"}, ""),
        (faults.gradient_that_is_not_a_number, STAGES, EVERYTHING, ""),
        (faults.scale_of_a_full_batch, GROWING, EVERYTHING, ""),
        (faults.scale_of_a_full_batch, STAGES, set(), ""),
        (faults.partial_gradients_taken_for_whole, ADAPTED, EVERYTHING, "lora_"),
        (faults.factors_that_begin_by_their_part, ADAPTED, {*EVERYTHING, "initial weights"}, "lora_"),
        (faults.second_factors_summed_once_more, ADAPTED, EVERYTHING, "lora_"),
        (faults.features_dropped_by_place_on_the_rank, ADAPTED, EVERYTHING, "lora_"),
        (faults.base_that_is_trained, ADAPTED, {"loss", "gradient norm", "weights after 3 steps"}, ""),
    ],
)
def test_a_planted_fault_is_found(
    fault: faults.Fault, config: Config, differing: set[str], where: str, ranks: Ranks
) -> None:
    told = ranks.run(faults.compare_with, fault, config)
    found = {difference.quantity: difference for difference in told[0]}
    assert {quantity for quantity, difference in found.items() if not difference.passed} == differing
    assert where in found["gradients"].where


def test_without_a_fault_the_same_configurations_pass(ranks: Ranks) -> None:
    for config in SOUND:
        assert all(difference.passed for difference in ranks.run(compare, config, 3, 1e-10)[0])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_in_files_are_compared_with_states_on_the_device(name: str, ranks: Ranks, tmp_path: Path) -> None:
    config = replace(configuration(dp_shard=2, tp=2), optim=Optim(name, placement=str(tmp_path)))
    assert all(difference.passed for difference in ranks.run(compare, config, 3, 1e-10)[0])
    lost = ranks.run(faults.compare_with, faults.states_that_are_not_written, config)[0]
    assert {found.quantity for found in lost if not found.passed} >= {"loss", "weights after 3 steps"}


def test_orders_that_were_searched_pass(ranks: Ranks) -> None:
    assert any(table_of(config).splits_backward for config in ORDERED)
    for config in ORDERED:
        assert table_of(config).name == "auto"
        assert all(difference.passed for difference in ranks.run(compare, config, 1, 1e-10)[0])


def test_a_budget_is_shrunk_to_one_that_mixes_modes(ranks: Ranks) -> None:
    assert len(ranks.run(faults.modes_in_use, MIXED)[0]) > 1


@pytest.mark.parametrize("compiles", [False, True])
def test_a_layout_is_compared_as_it_is_compiled(compiles: bool) -> None:
    """The single process is not compiled."""
    config = configuration()
    small = shrink(replace(config, train=replace(config.train, compile=compiles)))
    with one_rank(), patch.object(torch, "compile", side_effect=lambda forward, **_: forward) as compiled:
        assert all(difference.passed for difference in compare(small, 1, 1e-10))
    assert compiled.call_count == compiles * small.model.layers
    assert "compile" not in "; ".join(not_compared(small, 3))


@contextmanager
def logits_in_chunks() -> Iterator[None]:
    """As those of large models are, even of few tokens."""
    module = importlib.import_module("megalite_kernels.linear_cross_entropy")  # the package has the function there
    correct = module.chunk_tokens

    def chunk_tokens(tokens: int, *shape: object) -> int:
        chunk = correct(tokens, *shape)
        assert 2 * chunk < tokens
        return chunk

    with patch.multiple(module, MIN_CHUNK_TOKENS=1, chunk_tokens=chunk_tokens):
        yield


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_chunks_train_as_one_process_does(tied: bool, ranks: Ranks) -> None:
    config = configuration(tied=tied, pp=2, dp_shard=2, tp=2)
    config.parallel.pipeline = Pipeline("zb_h1")
    config.model.sequence_length = 64
    found = ranks.run(faults.compare_with, logits_in_chunks, config)[0]
    assert [difference for difference in found if not difference.passed] == []


def test_interpreted_kernels_pass_in_a_whole_layout(ranks: Ranks) -> None:
    """The reference is PyTorch's own operations."""
    config = replace(configuration(pp=2, dp_shard=2, tp=2, clip_norm=0.01), kernels="triton")
    config.train.recompute = "selective"
    assert all(difference.passed for difference in ranks.run(compare, config, 1, 1e-10)[0])
    wrong = ranks.run(faults.compare_with, faults.norm_kernel_that_forgets_epsilon, config, 1)
    assert not all(difference.passed for difference in wrong[0]), "they are what runs"


def test_kernels_that_cannot_run_are_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    words = ["verify", "configs/model/tiny.yaml", "kernels.rope=triton"]
    command = [sys.executable, "-m", "megalite.commands.main", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "kernels.rope = triton: triton is asked for, but tensors are on cpu" in done.stderr


def test_without_a_number_nothing_passes() -> None:
    assert not Difference("loss", float("nan"), 1.0, "step 0").passed
    assert Difference("loss", 0.0, 0.0, "step 0").passed


def test_the_table_tells_quantity_difference_and_place_in_80_columns() -> None:
    name = "layers.1.attention.k.weight"
    rows = [Difference("loss", 3e-16, 1e-12, "step 2"), Difference("gradients", 2.5, 1e-11, name)]
    console = Console(file=io.StringIO(), width=80)
    show(configuration(pp=2, tp=2), rows, console)
    lines = console.file.getvalue().splitlines()
    assert "pp 2 · tp 2 against one process, float64" in lines[0]
    loss, gradients = (next(line.split() for line in lines if quantity in line) for quantity in ("loss", "gradients"))
    assert ("3.0e-16" in loss, "1e-12" in loss, "ok" in loss, "2" in loss) == (True, True, True, True)
    assert ("2.5e+00" in gradients, "differs" in gradients, name in gradients) == (True, True, True)


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "megalite.commands.main", "verify", *arguments], 100, cwd=ROOT)


def test_the_command_compares_the_layout() -> None:
    done = verify("configs/model/tiny_gqa.yaml", "parallel.pp=2", "parallel.tp=2", "batch.global=2")
    assert done.returncode == 0, done.stderr
    assert "pp 2 · tp 2 against one process, float64" in done.stdout
    assert (done.stdout.count(" ok "), done.stdout.count("differs")) == (5, 0)
    assert "Not compared: sizes (" in done.stdout


def test_the_command_fails_above_the_tolerance() -> None:
    done = verify("configs/model/tiny.yaml", "parallel.tp=2", "batch.global=1", "--steps=1", "--tolerance=0")
    assert done.returncode == 1
    assert "differs" in done.stdout
    assert done.stdout.count("differs") > 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["parallel.pp=2", "parallel.pipeline.schedule=zb_h1", "train.compile=true"],
            "train.compile = true: cannot run with parallel.pipeline.schedule = zb_h1",
        ),
        (["batch.micro=auto", "run.device=cpu"], "batch.memory = null: is needed to fit batch.micro = auto"),
        (["batch.micro=auto", "batch.memory=1e-4"], "batch.memory = 0.0001: 105 KiB are too few"),
        (
            ["train.recompute=budget", "train.recompute_budget=1e-6"],
            "train.recompute_budget = 1e-06: the activations of a rank take",
        ),
        (["parallel.pp=2", "parallel.pipeline.schedule=gone.yaml"], "gone.yaml: cannot be read: No such file"),
    ],
)
def test_what_train_refuses_is_refused_before_it_is_shrunk(
    overrides: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["verify", str(ROOT / "configs/model/tiny_gqa.yaml"), "batch.global=8", *overrides]) == 2
    assert told in capsys.readouterr().err


def test_what_is_not_compared_is_told() -> None:
    batch = Batch(4, 1024, None, Rampup(64, None, 100), Curriculum(4, 100))
    config = replace(configuration(pp=2), batch=batch, train=Train())
    told = "; ".join(not_compared(config, 3))
    for what in (
        "batch.rampup but for 8 and 10 seq",
        "batch.curriculum but for 6 and 12 tok",
        "precision bf16",
        "batch.micro 4 as 2",
        "width",
    ):
        assert what in told
    assert "recompute_budget" not in told
    assert "apex" not in told
    assert "how batches grow" not in told
    assert "how batches grow, as --steps is 1" in not_compared(config, 1)
    graphed = replace(config, train=Train(cuda_graph=True))
    assert "train.cuda_graph" in not_compared(graphed, 3)
    assert not shrink(graphed).train.cuda_graph
    told = not_compared(replace(config, train=Train(precision="fp8", float8_recipe="mx")), 3)
    assert "the roundings of train.precision fp8" in told


@pytest.mark.parametrize(
    ("window", "small"), [(4096, 3), (32_768, 24), (1, 1), (1000, 2), (100_000, 73), (131_072, 131_072)]
)
def test_a_window_keeps_its_share_of_a_chunk(window: int, small: int) -> None:
    """At full size a rank of 8 has chunks of 8,192 tokens, and in the copy of 6."""
    model = replace(configuration().model, sequence_length=131_072, attention=Attention(window))
    config = replace(configuration(), model=model, parallel=Parallel(dp_shard=1, cp=8))
    assert shrink(config).model.sequence_length == 96
    assert shrink(config).model.attention.window == small
    told = "; ".join(not_compared(config, 3))
    assert (f"attention.window {window:,} as {small:,}" in told) == (window != small)


def test_what_is_nothing_but_rounding_is_measured_by_what_is_not() -> None:
    part = RankPart((slice(None),), torch.tensor([1e-20, 0.0], dtype=torch.float64))
    zeros = torch.tensor([0.0, 3e-21], dtype=torch.float64)
    assert _distance(zeros, part, noise=0.0) > 1
    assert _distance(zeros, part, noise=1e-4) < 1e-15
    assert _distance(zeros.zero_(), part, noise=0.0) == 1e-20


def test_a_norm_of_nothing_is_compared() -> None:
    """Weights can be so small that no gradient is left."""
    part = RankPart((slice(None),), torch.zeros(2, dtype=torch.float64))
    nothing = Trace([1.0], [0.0], weights := [("w", part)], [weights], weights)
    with one_rank():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        told = [_differences(nothing, replace(nothing, norms=[norm]), 1, 1e-10, mesh) for norm in (0.0, 3.0)]
    assert [differences[1].value for differences in told] == [0.0, 3.0]


USELESS = replace(
    configuration(pp=2),
    model=replace(STAGES.model, qk_norm=False, qkv_bias=True, attention=Attention(nope_every=1)),
    optim=Optim(eps=1e-30),
)


def test_a_bias_that_cannot_matter_is_no_false_alarm(ranks: Ranks) -> None:
    """A bias of all keys shifts all scores of a query; with so small an ε, AdamW makes a step of its roundings."""
    found = ranks.run(compare, USELESS, 3, 1e-10)[0]
    assert [difference for difference in found if not difference.passed] == []
    assert found[-1].without_gradient == ("layers.0.attention.k.bias", "layers.1.attention.k.bias")
    console = Console(file=io.StringIO(), width=200)
    show(USELESS, found, console)
    assert "2 weights without a gradient" in console.file.getvalue()
    found = ranks.run(faults.compare_with, faults.gradient_of_a_useless_bias, USELESS)[0]
    assert {difference.quantity for difference in found if not difference.passed} == {"gradients"}
    assert next(difference for difference in found if not difference.passed).where.endswith("k.bias")


def test_a_reference_that_learns_nothing_is_refused() -> None:
    with one_rank(), pytest.raises(InputError, match="no weight has a gradient, so any layout would agree"):
        faults.compare_with(faults.no_gradient_at_all, configuration())
    ones, more, none = (RankPart((slice(None),), value * torch.ones(2)) for value in (1.0, 1.1, 0.0))
    begun, after = [("v", ones), ("w", ones), ("x", ones)], [("v", more), ("w", ones), ("x", ones)]
    learns = Trace([3.5, 3.6], [1.0, 1.0], begun, [begun, begun], after)
    refuse_dead(learns, configuration(), 1e-10)
    refuse_dead(replace(learns, losses=[3.5]), configuration(), 1e-10)
    with pytest.raises(InputError, match=r"model\.init_std = 0\.02: .* the loss is 3\.5 whatever the tokens"):
        refuse_dead(replace(learns, losses=[3.5, 3.5]), configuration(), 1e-10)
    dead = replace(learns, gradients=[[("v", ones), ("w", none), ("x", none)]])
    with pytest.raises(InputError, match=r"model\.init_std = 0\.02: .* 2 of 3 weights have no gradient"):
        refuse_dead(dead, configuration(), 1e-10)
    with pytest.raises(InputError, match=r"optim\.lr = .*: changes no weight by more than 1\.0e-01 .* be compared"):
        refuse_dead(learns, configuration(), 0.11)


def test_the_scale_of_a_shard_is_found_in_a_copy_of_grouped_queries(ranks: Ranks) -> None:
    whole = load([str(ROOT / "configs/model/llama3_8b.yaml")], ["parallel.tp=2", "optim.name=muon"])
    small = shrink(check(whole))
    found = ranks.run(faults.compare_with, faults.muon_scale_of_a_shard, small)[0]
    assert not found[-1].passed


def test_bad_configurations_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["verify", str(ROOT / "configs/model/tiny_gqa.yaml"), "parallel.tp=4", "parallel.pp=9"]
    assert main.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "model.kv_heads = 2: must be divisible by parallel.tp = 4" in shown.err
    assert "parallel.pp = 9: makes 9 stages, more than model.layers = 4" in shown.err


LAYOUTS = [
    {"dp_shard": 1},
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"pp": 4, "dp_replicate": 2, "dp_shard": 1},
    {"dp_replicate": 2, "dp_shard": 4},
    {"pp": 2, "dp_shard": 1, "tp": 4},
]


def configured(preset: Path, degrees: dict[str, int], overrides: Sequence[str] = ()) -> Config:
    config = load([str(preset)], [*(f"parallel.{axis}={degree}" for axis, degree in degrees.items()), *overrides])
    if config.model.kv_heads % config.parallel.tp:
        pytest.skip("the preset has too few key-value heads for this layout")
    if config.model.experts is not None:
        config.parallel.ep = config.parallel.tp  # which does not split them
    return check(config)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=lambda degrees: " ".join(f"{k}{v}" for k, v in degrees.items()))
@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_shrunken_copy_is_valid_small_and_of_the_same_kind(preset: Path, degrees: dict[str, int]) -> None:
    whole = configured(preset, degrees, ["batch.global=64", "batch.micro=4"])
    small = shrink(whole)
    assert validate(small, whole.parallel.layout.world_size) == []
    assert small.parallel == whole.parallel
    assert small.train.precision == "fp64"
    assert small.model.layers * small.model.width <= 4096
    kind = ("tie_embeddings", "qk_norm", "qk_norm_width", "qkv_bias", "rope_theta", "rope_scaling", "norm", "norm_eps")
    assert [getattr(small.model, key) for key in kind] == [getattr(whole.model, key) for key in kind]
    assert (small.model.heads > small.model.kv_heads) == (whole.model.heads > whole.model.kv_heads)
    kinds = [
        {(kind.attention.heads.scores.window is None, kind.rope is not None) for kind in layer_kinds(each.model)}
        for each in (small, whole)
    ]
    assert kinds[0] == kinds[1]
    tp = whole.parallel.tp
    assert (small.model.kv_heads > tp) == (whole.model.kv_heads > tp)
    assert (small.model.head_width is None) == (whole.model.head_width is None)
    assert orders(small.model) == orders(whole.model)
    assert micro_batches(small) == min(micro_batches(whole), 2 * whole.parallel.pp + 1)


@pytest.mark.parametrize(("method", "cp"), [("ring", 1), ("ulysses", 8)])
@pytest.mark.parametrize("rank", ["null", "1536"])
def test_a_shrunken_copy_has_latents_of_the_same_kinds(rank: str, method: str, cp: int) -> None:
    sizes = "width=7168 heads=128 kv_heads=128 head_width=192 rotary_width=64 sequence_length=4096"
    latent = f"model.attention.latent={{query_rank: {rank}}}"
    layout = ["parallel.tp=2", f"parallel.cp={cp}", f"parallel.context.method={method}", "parallel.dp_shard=1"]
    whole = check(load([], [*(f"model.{size}" for size in sizes.split()), latent, *layout]))
    small = shrink(whole)
    assert validate(small, 2 * cp) == []
    found = small.model.attention.latent
    assert found is not None
    assert (found.query_rank is None) == (rank == "null")
    assert found.key_rank < (found.query_rank or small.model.width) <= small.model.width
    assert found.value_width < small.model.head_size
    assert f"latent.key_rank 512 as {found.key_rank}" in "; ".join(not_compared(whole, 3))
    assert small.model.heads == small.model.kv_heads >= max(4, 2 * cp)


@pytest.mark.parametrize(
    ("vocabulary", "tp"), [(32001, 2), (32000, 2), (32000, 4), (50257, 1), (50257, 4), (37, 3), (5, 4)]
)
def test_a_shrunken_copy_has_padding_where_the_model_has(vocabulary: int, tp: int) -> None:
    whole = configuration(tp=tp)
    whole.model = replace(
        whole.model, vocab_size=vocabulary, heads=12, kv_heads=12, width=24, ffn=36, sequence_length=24
    )
    small = shrink(check(whole))
    assert padding(small.model.vocab_size, tp) == padding(vocabulary, tp)
    assert small.model.vocab_size <= vocabulary


def padding(vocabulary: int, tp: int) -> tuple[bool, bool]:
    """Whether there is any, and whether a rank has nothing else."""
    rows = vocabulary_rows(vocabulary, tp)
    return rows * tp > vocabulary, rows * (tp - 1) >= vocabulary


def orders(model: Model) -> list[tuple[bool, bool]]:
    """Whether the other sides of matrices are longer than the width, and as long."""
    sides = (model.ffn, model.vocab_size, model.heads * model.head_size)
    return [(side > model.width, side == model.width) for side in sides]


def micro_batches(config: Config) -> int:
    return config.batch.global_ // (config.batch.micro * config.parallel.layout.dp)


@pytest.mark.parametrize("length", [4096, 131_072])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_shrunken_copy_has_sequences_as_long_beside_the_original_length(kind: str, length: int) -> None:
    model = configured(Path("configs/model/llama2_7b.yaml"), {}, []).model
    factors = {
        name: [1.0 + i for i in range(48)] if kind == "longrope" else None for name in ("short_factors", "long_factors")
    }
    scaling = RopeScaling(kind, original_length=4096, **factors)
    model = replace(model, sequence_length=length, rotary_width=96, rope_scaling=scaling)
    whole = replace(configuration(), model=model)
    small = shrink(whole)
    assert validate(small, whole.parallel.layout.world_size) == []
    assert small.model.rope_scaling is not None
    assert small.model.rotary_width == 6
    assert (small.model.sequence_length > small.model.rope_scaling.original_length) == (length > 4096)
    if kind == "longrope":
        assert small.model.rope_scaling.long_factors == [1, 17, 33]


@pytest.mark.parametrize("key", ["full_every", "nope_every"])
def test_a_shrunken_copy_has_layers_of_every_kind(key: str) -> None:
    model = replace(configuration().model, layers=30, attention=Attention(window=4))
    small = shrink(replace(configuration(), model=replace(model, attention=replace(model.attention, **{key: 6}))))
    assert getattr(small.model.attention, key) == small.model.layers == 3
    assert len(set(layer_kinds(small.model))) == 2
    rare = replace(configuration(), model=replace(model, attention=replace(model.attention, **{key: 31})))
    assert getattr(shrink(rare).model.attention, key) == 31
    assert f"attention.{key}" not in "; ".join(not_compared(rare, 3))


@pytest.mark.parametrize(
    ("full", "ep", "small"),
    [
        (Experts(128, 8, 1536, first_dense=3, every=4), 1, Experts(8, 2, 24, first_dense=1, every=2)),
        (Experts(16, 1), 1, Experts(8, 1)),
        (Experts(4, 3, 64), 1, Experts(4, 2, 36)),
        (Experts(16, 16), 1, Experts(8, 8)),
        (Experts(128, 8, 64), 2, Experts(8, 2, 36)),
        (Experts(64, 6, scale=2.5, scores="sigmoid"), 8, Experts(16, 2, scale=2.5, scores="sigmoid")),
        (Experts(2, 1, force_balance=True), 2, Experts(2, 1)),
        (Experts(12, 2, 64), 2, Experts(6, 2, 36)),
    ],
)
def test_a_shrunken_copy_has_fewer_experts_and_layers_with_and_without(full: Experts, ep: int, small: Experts) -> None:
    """Experts here are wider than the model, or as wide as its other feed-forwards."""
    degrees = {"dp_shard": 8, "ep": ep}
    config = configuration(**degrees)
    model = replace(config.model, layers=30, width=32 if full.width == 64 else 1024, experts=full)
    config = replace(config, model=model, batch=Batch(1, 8))
    shrunk = shrink(config)
    assert validate(config, 8) == validate(shrunk, 8) == []
    found = shrunk.model.experts
    assert replace(found, width=None) == replace(small, width=None)
    assert (found.width is None) == (full.width is None)
    same = config.parallel.expert_shards  # ranks, which shard whole experts or parts of them
    assert (found.count // ep % same == 0) == (full.count // ep % same == 0)
    if full.width is not None:
        assert found.width > shrunk.model.width
    kinds = [{type(kind.feed_forward) for kind in layer_kinds(each)} for each in (model, shrunk.model)]
    assert kinds[0] == kinds[1]
    told = "; ".join(not_compared(config, 3))
    assert (f"experts.count {full.count} as {small.count}" in told) == (full.count != small.count)
    assert ("model.experts.force_balance" in told) == full.force_balance


def test_experts_that_are_forced_to_be_balanced_are_no_false_alarm(ranks: Ranks) -> None:
    config = configuration(dp_shard=2, cp=2)
    experts = Experts(16, 3, first_dense=1, balance_loss=0.1, force_balance=True)
    config = shrink(replace(config, model=replace(config.model, experts=experts)))
    assert [difference for difference in ranks.run(compare, config, 3, 1e-10)[0] if not difference.passed] == []


@pytest.mark.parametrize(
    ("layers", "split", "kept"),
    [(7, [0, 5, 1, 1], [0, 2, 1, 1]), (5, [1, 2, 1, 1], [1, 2, 1, 1]), (80, [20, 21, 20, 19], [2, 2, 2, 2])],
)
def test_an_explicit_split_keeps_its_short_stages(layers: int, split: list[int], kept: list[int]) -> None:
    config = configuration(pp=4)
    config = replace(
        config,
        model=replace(config.model, layers=layers),
        parallel=replace(config.parallel, pipeline=Pipeline(split=split)),
    )
    small = shrink(config)
    assert small.parallel.pipeline.split == kept
    assert small.model.layers == sum(kept)
    assert validate(small) == []


def test_layers_that_do_not_divide_evenly_stay_uneven() -> None:
    config = configuration(pp=2)
    small = shrink(replace(config, model=replace(config.model, layers=33)))
    assert small.model.layers % 2 == 1


def test_few_micro_batches_stay_few() -> None:
    config = replace(configuration(pp=4), batch=Batch(4, 8))
    assert micro_batches(shrink(config)) == 2


def test_a_learning_rate_that_makes_more_of_roundings_is_lowered() -> None:
    config = replace(configuration(), optim=Optim(lr=1.0))
    assert shrink(config).optim.lr == 0.01
    assert "optim.lr 1 as 0.01" in not_compared(config, 3)
    assert "optim.lr" not in "; ".join(not_compared(configuration(), 3))


def test_a_base_is_as_many_times_smaller_in_the_copy() -> None:
    """And never as large as the copy, where factors of 1 would hide a missing one."""
    model = Model(32, 4096, 32, 8, None, 14336, parametrization="completep", base=Base(256, 4, 32))
    small = shrink(Config(model=model, parallel=Parallel(tp=2, dp_shard=1), batch=Batch(1, 4))).model
    assert small.base == Base(small.width // 16, 1, 2)
    wide = replace(model, base=Base(4095, 33, None))
    small = shrink(Config(model=wide, parallel=Parallel(dp_shard=1), batch=Batch(1, 4))).model
    assert small.base is not None
    assert small.base.width != small.width
    assert (small.base.layers != small.layers, small.base.head_width) == (True, None)
    same = replace(model, base=Base(4096, 32, 128))
    small = shrink(Config(model=same, parallel=Parallel(dp_shard=1), batch=Batch(1, 4))).model
    assert small.base == Base(small.width, small.layers, small.head_size)


def test_apex_is_left_out() -> None:
    small = shrink(replace(configuration(), kernels=Kernels(rms_norm="apex", rope="torch", adamw="apex")))
    assert small.kernels == Kernels(rope="torch")


def test_automatic_batches_become_plain_ones() -> None:
    assert shrink(replace(configuration(pp=2), batch=Batch("auto", 8))).batch == Batch(1, 5)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("start", [4, 16, 60, 64])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_growing_batches_grow_after_the_first_step(start: int, pieces: int, cp: int) -> None:
    config = configuration(pp=2, tp=2, cp=cp, dp_shard=2)
    whole = replace(
        config,
        model=replace(config.model, sequence_length=64),
        batch=Batch(2, 64, None, Rampup(start, 4, 10**6), Curriculum(64 // pieces, 10**6)),
    )
    small = shrink(whole)
    assert (validate(whole), validate(small)) == ([], [])
    steps = list(islice(global_batches(small, 0), 3))
    assert steps[1:] == [GlobalBatch(at, small.batch.global_) for at in (steps[1].first, steps[2].first)]
    assert (steps[0].samples < small.batch.global_) == (start < 64)
    assert steps[0].pieces == min(pieces, 2)


@pytest.mark.parametrize("degrees", [{}, {"pp": 2}, {"pp": 4, "dp_shard": 2}, {"tp": 2, "cp": 2}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_a_shrunken_budget_mixes_modes(schedule: str, degrees: dict[str, int]) -> None:
    config = configuration(**degrees)
    config = replace(
        config,
        model=replace(config.model, layers=24),
        parallel=replace(config.parallel, pipeline=Pipeline(schedule)),
        batch=Batch(1, 64),
        train=Train(recompute="budget", recompute_budget=100.0),
    )
    assert len({mode for modes in resolve(shrink(config)).modes.values() for mode in modes}) > 1
