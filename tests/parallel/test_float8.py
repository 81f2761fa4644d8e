"""Matrix products in 8 bits: the same numbers in every layout, near those of bfloat16, and cast no more than needed."""

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
from megalite.config.schema import Batch, Config, DataMode
from megalite.parallel import float8, linear
from megalite.parallel.float8 import RECIPES, Float8, MxFloat8, RowwiseFloat8, WeightCasts, check_float8, use_float8
from megalite.parallel.product import PLAIN_PRODUCT
from megalite.parallel.tensor import Linear
from megalite.train import build
from megalite.train.build import Job
from megalite_kernels import mxfp8
from megalite_kernels.float8 import ACTIVATION, GRADIENT, amax, reference, scale_for

WIDE = torch.float64


def rounded(x: Tensor, dtype: torch.dtype, dim: int, recipe: str) -> Tensor:
    """What a tensor in 8 bits stands for. dim: along which numbers share a scale, if not all of them do."""
    if recipe == "mx":
        return mxfp8.wide(*mxfp8.reference(x.movedim(dim, -1))).double().movedim(-1, dim)
    scale = scale_for(amax(x, dim if recipe == "rowwise" else None), dtype)
    return reference(x, scale, dtype).double() / scale


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def product(recipe: str) -> Float8:
    return RECIPES[recipe](WIDE, WeightCasts(held=False))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        3 * torch.randn(16, 4, 96, dtype=WIDE, generator=generator),
        torch.randn(32, 96, dtype=WIDE, generator=generator) / 50,
        1e-4 * torch.randn(16, 4, 32, dtype=WIDE, generator=generator),
    )


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_products_are_those_of_the_rounded_operands(product: Float8, recipe: str, factor: float) -> None:
    x, weight, grad = operands()
    kind = GRADIENT if recipe == "tensorwise" else ACTIVATION
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    close = {"rtol": 1e-12, "atol": 1e-18}
    wide_x, matrix = rounded(x, ACTIVATION, -1, recipe), grad.flatten(0, 1)
    expected = factor * wide_x @ rounded(weight, ACTIVATION, -1, recipe).t()
    torch.testing.assert_close(product.forward(prepared, (weight,), factor), expected, **close)
    with_bias = product.forward(prepared, (weight,), factor, weight[:, 0])
    torch.testing.assert_close(with_bias, expected + weight[:, 0], **close)
    expected = factor * rounded(grad, kind, -1, recipe) @ rounded(weight, ACTIVATION, 0, recipe)
    torch.testing.assert_close(product.input_gradient(of_output, (weight,), None, factor), expected, **close)
    torch.testing.assert_close(product.input_gradient(of_output, (weight,), x.clone(), factor), x + expected, **close)
    of_tokens = rounded(wide_x.flatten(0, 1), ACTIVATION, 0, recipe)
    expected = factor * rounded(matrix, kind, 0, recipe).t() @ of_tokens
    kept = product.prepare_kept(prepared)
    torch.testing.assert_close(product.weight_gradient(of_output, kept, factor), expected, **close)


def test_gradients_are_near_those_that_are_not_rounded(product: Float8) -> None:
    """Each operand is rounded by 2⁻⁴ of a number at most, gradients with one scale by 2⁻³."""
    x, weight, grad = operands()
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    kept = product.prepare_kept(prepared)
    found = product.input_gradient(of_output, (weight,), None), product.weight_gradient(of_output, kept)
    rounding = 2**-4 + (2**-3 if product.gradient == GRADIENT else 2**-4)
    for near, exact in zip(found, (grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)), strict=True):
        assert 0 < (near - exact).norm() < rounding / 2 * exact.norm()


@pytest.mark.parametrize(("recipe", "kept"), [("tensorwise", False), ("rowwise", True), ("mx", True)])
def test_small_rows_are_kept_where_each_has_a_scale(recipe: str, kept: bool) -> None:
    (x, weight, _), product = operands(), RECIPES[recipe](WIDE, WeightCasts(held=False))
    x[0] *= 2.0**-40
    y = product.forward(product.prepare(x), (weight,))
    assert (y[0] != 0).all() == kept
    assert (y[1:] != 0).all()


def test_a_kept_input_is_rounded_no_second_time_where_it_is_not_small_in_its_column() -> None:
    x, product = operands()[0], RowwiseFloat8(WIDE, WeightCasts(held=False))
    whole = rounded(x, ACTIVATION, -1, "rowwise").flatten(0, 1)
    columns, inverse = product.prepare_kept(product.prepare(x))
    again = (columns.double() * inverse).t()
    large = whole.abs() >= amax(whole, 0) * 2.0**-14  # 448 / 2⁻⁶, the least normal number, is above 2¹⁴
    assert large.sum() > 0.9 * large.numel()
    assert torch.equal(again[large], whole[large])


def test_nor_where_it_is_not_small_in_its_block() -> None:
    x, product = operands()[0], MxFloat8(WIDE, WeightCasts(held=False))
    whole = rounded(x, ACTIVATION, -1, "mx").flatten(0, 1)
    again = mxfp8.wide(*product.prepare_kept(product.prepare(x))).double().t()
    large = whole.abs() >= (amax(whole.unflatten(0, (-1, 32)), 1) * 2.0**-14).expand(-1, 32, -1).flatten(0, 1)
    assert large.sum() > 0.9 * large.numel()
    assert torch.equal(again[large], whole[large])


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_products_of_bfloat16_are_pytorchs_and_round_the_same_numbers(
    recipe: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 14 bits are in forward alone."""
    if recipe == "mx" or (recipe == "rowwise" and not float8.CPU_SCALES_ROWS):
        pytest.skip("PyTorch has no such product on CPUs, and with scales of rows none before 2.12")
    x, weight, grad = (each.bfloat16() for each in operands())
    found, fast, scaled_mm = [], list[bool](), torch._scaled_mm

    def noted(*args: Any, use_fast_accum: bool, **options: Any) -> Tensor:
        fast.append(use_fast_accum)
        return scaled_mm(*args, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    for product in (RECIPES[recipe](dtype, WeightCasts(held=False)) for dtype in (torch.bfloat16, WIDE)):
        prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
        y, of_x = (
            product.forward(prepared, (weight,), factor, weight[:, 0]),
            product.input_gradient(of_output, (weight,), None, factor),
        )
        found.append((y, of_x, product.weight_gradient(of_output, product.prepare_kept(prepared), factor)))
    assert fast == [True, False, False]
    for near, exact in zip(*found, strict=True):
        assert near.dtype == torch.bfloat16
        torch.testing.assert_close(near.double(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item())


def product_of_blocks(
    a: Tensor,
    b: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """A GPU's product, whose scales lie in tiles; shapes and strides are those that it takes."""
    exact = []
    for values, scales in ((a, of_a), (b.t(), of_b)):
        assert values.is_contiguous()
        assert scales.dtype == torch.float8_e8m0fnu
        down, across = -(-len(values) // 128), -(-values.shape[1] // 128)
        plain = scales.view(torch.uint8).view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
        plain = plain.reshape(128 * down, 4 * across)[: len(values), : values.shape[1] // 32]
        exact.append(mxfp8.wide(values, plain).double())
    made = (exact[0] @ exact[1].t() + (0 if bias is None else bias.double())).to(out_dtype)
    return made if out is None else out.copy_(made)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_gpu_multiplies_the_same_blocks(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales lie in tiles; weight gradients are float32 where they are added up."""
    x, weight, grad = (each.bfloat16() for each in operands())
    found = []
    for dtype, has_gpu in ((torch.bfloat16, True), (WIDE, False)):
        monkeypatch.setattr(torch, "_scaled_mm", product_of_blocks)
        monkeypatch.setattr(float8, "has_gpu_products", lambda _, has_gpu=has_gpu: has_gpu)
        product, sums = MxFloat8(dtype, WeightCasts(held=True)), (torch.ones(32, 96), torch.ones(32, 96))
        with product.casts.once():
            prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
            w = product.prepare_weight(weight, weight)
            kept = product.prepare_kept(prepared)
            y = product.forward(prepared, w, factor, weight[:, 0])
            of_x = product.input_gradient(of_output, w, None, factor)
        for total, has_values in zip(sums, (True, False), strict=True):
            product.add_weight_gradient(total, has_values, of_output, kept, factor)
        found.append((y, of_x, product.weight_gradient(of_output, kept, factor), *sums))
    for near, exact in zip(*found, strict=True):
        unit = 2**-8 if near.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(near.double(), exact.double(), rtol=unit, atol=unit * exact.abs().max().item())


def test_a_traced_product_and_its_gradients_are_those_of_others(product: Float8) -> None:
    x, weight, grad = operands()
    prepared, of_output, factor = product.prepare(x), product.prepare_gradient(grad), 0.3
    bias = torch.ones(len(weight), dtype=WIDE, requires_grad=True)
    y = float8._Traced.apply(x.requires_grad_(), weight.requires_grad_(), bias, product, factor)
    of_x, of_weight, of_bias = torch.autograd.grad(y, (x, weight, bias), grad)
    assert torch.equal(y, product.forward(prepared, (weight,), factor, bias))
    assert torch.equal(of_bias, grad.flatten(0, 1).sum(0))
    assert torch.equal(of_x, product.input_gradient(of_output, (weight,), None, factor))
    assert torch.equal(of_weight, product.weight_gradient(of_output, product.prepare_kept(prepared), factor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, WIDE])
def test_products_of_zeros_are_zeros(recipe: str, dtype: torch.dtype) -> None:
    product = RECIPES[recipe](dtype, WeightCasts(held=False))
    x, weight, grad = (torch.zeros_like(each, dtype=dtype) for each in operands())
    prepared, of_output = product.prepare(x), product.prepare_gradient(grad)
    for found in (
        product.forward(prepared, (weight,)),
        product.input_gradient(of_output, (weight,), None),
        product.weight_gradient(of_output, product.prepare_kept(prepared)),
    ):
        assert torch.equal(found, torch.zeros_like(found))


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
