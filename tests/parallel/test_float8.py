"""Training with products in 8 bits: the same numbers in every layout, and casts no more often than needed."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp._fully_shard import _fsdp_state
from toy_jobs import advance, config_of, make, one_rank, parts, restorer, save

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.parallel_schema import DataMode
from megalite.config.schema import Batch, Config
from megalite.parallel import float8, linear
from megalite.parallel.float8 import RECIPES, Float8, WeightCasts, check_float8, use_float8
from megalite.parallel.product import PLAIN_PRODUCT
from megalite.parallel.tensor import Linear
from megalite.train import build
from megalite.train.build import Job
from megalite_kernels import mxfp8
from megalite_kernels.float8 import ACTIVATION

WIDE = torch.float64

each_recipe = pytest.mark.parametrize("recipe", RECIPES)

MODEL = Model(layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocab_size=32, sequence_length=16)
EVEN = replace(MODEL, width=32, heads=2, ffn=64, sequence_length=32)  # sizes are multiples of 32
BLOCKS = replace(MODEL, width=64, kv_heads=4, ffn=64, sequence_length=128)  # and so are parts of tp and cp


def model_of(recipe: str) -> Model:
    return BLOCKS if recipe == "mx" else MODEL


def scales_and_losses(
    recipe: str, layout: Layout, schedule: str = "1f1b", traced: bool = False
) -> tuple[set[tuple[torch.dtype, str]], list[float]]:
    """The largest values of all that this rank casts in a first step, from which scales follow; the losses of three.

    All but products is in float64. A micro-batch is one sequence. On a CPU, sizes may be any. traced: products are
    those of compiled layers.
    """
    found, original, of_blocks = set(), float8.scale_for, mxfp8.scales_of

    def noted(largest: Tensor, dtype: torch.dtype) -> Tensor:
        found.update((dtype, f"{each:.5e}") for each in largest.flatten().tolist())
        return original(largest, dtype)

    def noted_blocks(x: Tensor) -> Tensor:
        found.update((ACTIVATION, f"{each:.5e}") for each in x.unflatten(-1, (-1, 32)).abs().amax(-1).flatten())
        return of_blocks(x)

    job = make(replace(config_of(layout, model_of(recipe), schedule), batch=Batch(micro=1, global_=8)))
    job.casts = WeightCasts(held=True)
    for stage in job.stages.values():
        use_float8(stage.layers, (), WIDE, job.mesh, job.casts, recipe)
    with pytest.MonkeyPatch.context() as patched:
        for module in (float8, linear) if traced else ():
            patched.setattr(module.torch.compiler, "is_compiling", lambda: True)
            patched.setattr(_fsdp_state, "detect_compiled_autograd", lambda: None, raising=False)  # refuses
        with pytest.MonkeyPatch.context() as noting:
            noting.setattr(float8, "scale_for", noted)
            noting.setattr(mxfp8, "scales_of", noted_blocks)
            losses = advance(job, 0, 1)
        return found, losses + advance(job, 1, 3)


@each_recipe
def test_all_layouts_have_the_same_scales_and_train_alike(recipe: str, ranks: Ranks) -> None:
    with one_rank():
        scales, expected = scales_and_losses(recipe, Layout())
        plain = advance(make(config_of(Layout(), model_of(recipe))), 0, 3)
    assert expected != pytest.approx(plain, rel=1e-6)
    assert expected == pytest.approx(plain, rel=0.02)
    three = Layout(dp_shard=2, tp=2, cp=2)
    cases = ((three, "1f1b", False), (Layout(pp=2, dp_shard=2, tp=2), "zb_h1", False), (three, "1f1b", True))
    for layout, schedule, traced in cases:
        everywhere = set[tuple[torch.dtype, str]]()
        for found, losses in ranks.run(scales_and_losses, recipe, layout, schedule, traced):
            assert losses == pytest.approx(expected, rel=1e-12)
            everywhere |= found
        assert everywhere == scales


def configured(mode: DataMode = "zero1", model: Model = EVEN, **train: Any) -> Config:
    """Two micro-batches a step in fp8."""
    config = config_of(Layout(), model)
    parallel = replace(config.parallel, data=replace(config.parallel.data, mode=mode))
    settings = replace(config.train, **{"precision": "fp8", **train})
    return replace(config, batch=Batch(micro=1, global_=2), parallel=parallel, train=settings)


def losses_of(recipe: str, layout: Layout) -> list[float]:
    """The losses of two steps of `train.precision: fp8`, whose results are in bfloat16."""
    config = replace(config_of(layout, BLOCKS), batch=Batch(micro=1, global_=4))
    job = make(replace(config, train=replace(config.train, precision="fp8", float8_recipe=recipe)))
    assert {type(module.product) for module in linears_of(job)} == {RECIPES[recipe]}
    return advance(job, 0, 2)


@each_recipe
def test_a_layout_in_fp8_is_as_far_from_one_process_as_bfloat16_rounds(recipe: str, ranks: Ranks) -> None:
    with one_rank():
        expected = losses_of(recipe, Layout())
    for losses in ranks.run(losses_of, recipe, Layout(dp_shard=4, tp=2)):
        assert losses == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_are_cast_once_a_step_where_they_stay_gathered(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no cast outlives its step: losses are those of weights that are cast whenever they are used."""
    counts, losses, original = dict[str, int](), dict[str, list[float]](), Float8._cast

    def noted(self: Float8, shapes: list[torch.Size], x: Tensor, *args: Any, **layouts: bool) -> tuple[Tensor, ...]:
        if x.ndim == 2:  # a weight
            shapes.append(x.shape)
        return original(self, x, *args, **layouts)

    with one_rank():
        for mode in ("zero1", "zero3"):
            job, shapes = make(configured(mode, recompute=recompute)), list[torch.Size]()
            monkeypatch.setattr(Float8, "_cast", partialmethod(noted, shapes))
            losses[mode] = advance(job, 0, 1)
            counts[mode] = len(shapes)
            losses[mode] += advance(job, 1, 3)
        assert not job.casts.keeps
    assert losses["zero1"] == losses["zero3"]
    forwards = 2 if recompute == "full" else 1
    assert counts == {"zero1": 2 * 7, "zero3": 2 * 7 * 2 * (1 + forwards)}


@each_recipe
def test_a_key_chooses_the_recipe(recipe: str) -> None:
    with one_rank():
        job = make(configured(float8_recipe=recipe))
    assert {type(module.product) for module in linears_of(job)} == {RECIPES[recipe]}


def test_the_device_is_checked_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[torch.device, str]]()
    monkeypatch.setattr(build, "check_float8", lambda *given: asked.append(given))
    with one_rank():
        make(configured(precision="bf16"))
        assert not asked
        make(configured(float8_recipe="mx"))
    assert asked == [(torch.device("cpu"), "mx")]


def test_a_checkpoint_goes_on_in_bf16(tmp_path: Path) -> None:
    with one_rank():
        config = configured()
        job = make(config)
        advance(job, 0, 1)
        folder, expected = save(job, tmp_path, 1), parts(job)
        resumed = make(replace(config, train=replace(config.train, precision="bf16")))
        restorer(resumed).all(folder)
        found = parts(resumed)
        assert {module.product for module in linears_of(resumed)} == {PLAIN_PRODUCT}
    assert found.keys() == expected.keys()
    for name, part in found.items():
        assert torch.equal(part.values, expected[name].values)


def linears_of(job: Job) -> list[Linear]:
    return [module for stage in job.stages.values() for module in stage.layers.modules() if isinstance(module, Linear)]


@each_recipe
def test_a_compiled_layer_is_one_graph_and_trains_alike(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda layer, **given: compiler(layer, **given, **options))
    torch._dynamo.reset()
    counters.clear()
    model = replace(EVEN, layers=1)
    with one_rank():
        expected = advance(make(configured(model=model, float8_recipe=recipe)), 0, 2)
        found = advance(make(configured(model=model, float8_recipe=recipe, compile=True)), 0, 2)
    assert counters["stats"]["unique_graphs"] == 1
    assert found == pytest.approx(expected, rel=1e-5)


def test_matrices_whose_parts_are_no_multiples_of_16_stay_in_bf16() -> None:
    with one_rank():
        job = make(configured(model=replace(EVEN, ffn=40)))
        names = {name for name, module in job.stages[0].layers.named_modules() if module in wide_of(job)}
    assert names == {f"{layer}.mlp.{name}" for layer in range(2) for name in ("gate", "up", "down")}


def wide_of(job: Job) -> list[Linear]:
    return [module for module in linears_of(job) if module.product is PLAIN_PRODUCT]


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("rowwise", (8, 0), 'train.precision = "fp8": {} capability 8.9 or later, and this is 8.0; use bf16'),
        ("tensorwise", (8, 9), ""),
        ("rowwise", (9, 0), ""),
        ("mx", (8, 0), 'train.precision = "fp8": {} capability 8.9 or later, and this is 8.0; use bf16'),
        (
            "mx",
            (9, 0),
            'train.float8_recipe = "mx": {} capability 10.0 or later, and this is 9.0; use tensorwise or rowwise',
        ),
        ("mx", (10, 0), ""),
        ("mx", (12, 0), ""),
    ],
)
def test_gpus_without_products_in_8_bits_are_refused(
    recipe: str, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    message = re.escape(said.format("needs GPUs of compute"))
    with pytest.raises(InputError, match=message) if said else nullcontext():
        check_float8(torch.device("cuda"), recipe)
    check_float8(torch.device("cpu"), recipe)
