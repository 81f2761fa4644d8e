"""Other matrix products take the place of PyTorch's, and weights that are not trained get no gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from toy_jobs import advance, config_of, make, one_rank

from megalite.base.errors import InputError
from megalite.config.layout import Layout
from megalite.config.rules.train import train_rules
from megalite.distributed.mesh import Mesh
from megalite.parallel.linear import WeightGradients, linears
from megalite.parallel.product import PLAIN_PRODUCT, Plain, Prepared
from megalite.parallel.tensor import ColumnLinear, Linear, columns, split_backward, use_product
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import UP_PROJECTION
from megalite.train.build import Job, build_product
from megalite_kernels import products


class Apart(Plain):
    """Products that tell apart which of the three was taken."""

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, weight, factor, bias)

    def input_gradient(self, grad: Prepared, weight: Prepared, total: Tensor | None, factor: float = 1.0) -> Tensor:
        return 3 * super().input_gradient(grad, weight, None, factor) + (0 if total is None else total)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        return 5 * super().weight_gradient(grad, x, factor)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with one_rank():
        found = Mesh.build(Layout(), torch.device("cpu"))
        assert found is not None
        yield found


def layers(mesh: Mesh, trained: Sequence[bool] = (True, True)) -> list[ColumnLinear]:
    weights = (Weight((width, 4), UP_PROJECTION, each) for width, each in zip((3, 2), trained, strict=True))
    made = [ColumnLinear(weight, mesh.tp).double().to_empty(device="cpu") for weight in weights]
    for number, layer in enumerate(made):
        generator = torch.Generator().manual_seed(number)
        layer.weight.data.to_local().copy_(torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64))
    return made


def through(made: list[ColumnLinear], mesh: Mesh) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The gradient of the input, outputs, and gradients of weights."""
    x = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4).requires_grad_()
    outputs = columns(x, made, mesh.tp.get_group())
    sum(y.square().sum() for y in outputs).backward()
    assert x.grad is not None
    grads = [None if layer.weight.grad is None else layer.weight.grad.to_local() for layer in made]
    return x.grad, [y.detach() for y in outputs], grads


def test_each_of_the_three_products_is_replaced(mesh: Mesh) -> None:
    of_x, outputs, of_weights = through(layers(mesh), mesh)
    others = layers(mesh)
    for layer in others:
        layer.product = Apart()
    of_x_apart, outputs_apart, of_weights_apart = through(others, mesh)
    torch.testing.assert_close(outputs_apart, [2 * y for y in outputs])
    torch.testing.assert_close(of_x_apart, 2 * 3 * of_x)  # gradients of outputs are twice as large, too
    torch.testing.assert_close(of_weights_apart, [2 * 5 * grad for grad in of_weights])


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_outputs_are_no_views(factor: float, mesh: Mesh) -> None:
    """FSDP2 warns of those that a module returns."""
    (layer, _) = layers(mesh)
    (y,) = linears(torch.ones(3, 2, 4, dtype=torch.float64), [layer.weight], factor=factor)
    assert y.requires_grad
    assert not y._is_view()


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("trained", [False, True])
def test_a_product_adds_its_bias_whose_gradient_does_not_wait(trained: bool, factor: float, mesh: Mesh) -> None:
    x = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4)
    bias = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (layer, _) = layers(mesh, (trained, True))
    expected = factor * x @ layer.weight.to_local().t() + bias
    (of_bias,) = torch.autograd.grad(expected.square().sum(), bias)
    gradients = WeightGradients()
    with gradients.put_off():
        (y,) = linears(x, [layer.weight], gradients=gradients, factor=factor, biases=[bias])
        y.square().sum().backward()
    torch.testing.assert_close((y, bias.grad), (expected, of_bias), rtol=1e-14, atol=0)
    with torch.no_grad():
        assert torch.equal(linears(x, [layer.weight], factor=factor, biases=[bias])[0], y)


@pytest.mark.parametrize("puts_off", [False, True])
def test_a_weight_that_is_not_trained_gets_no_gradient(puts_off: bool, mesh: Mesh) -> None:
    of_x, _, (_, second) = through(layers(mesh), mesh)
    made = layers(mesh, trained=(False, True))
    gradients = split_backward(torch.nn.ModuleList(made))
    if puts_off:
        with gradients.put_off() as waiting:
            found, _, of_weights = through(made, mesh)
        assert of_weights == [None, None]
        with torch.no_grad():
            for make_gradients in waiting:
                make_gradients()
        of_weights = [None if layer.weight.grad is None else layer.weight.grad.to_local() for layer in made]
    else:
        found, _, of_weights = through(made, mesh)
    assert torch.equal(found, of_x)
    assert of_weights[0] is None
    assert second is not None
    assert of_weights[1] is not None
    assert torch.equal(of_weights[1], second)


def test_layers_that_are_not_trained_keep_no_input_and_put_nothing_off(mesh: Mesh) -> None:
    of_x, *_ = through(layers(mesh), mesh)
    made, saved = layers(mesh, trained=(False, False)), list[torch.Size]()
    gradients = split_backward(torch.nn.ModuleList(made))
    with (
        saved_tensors_hooks(lambda tensor: (saved.append(tensor.shape), tensor)[1], lambda kept: kept),
        gradients.put_off() as waiting,
    ):
        found, _, of_weights = through(made, mesh)
    assert torch.equal(found, of_x)
    assert of_weights == [None, None]
    assert waiting == []
    assert (3, 2, 4) not in saved


class Narrow(Plain):
    """Products in bfloat16 of float32 or float64: an input is cast once, and kept as it was cast."""

    casts = 0

    def prepare(self, x: Tensor) -> Prepared:
        type(self).casts += 1
        size = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-9).log2().floor().exp2()  # exact in any layout
        return (x / size).bfloat16(), size

    def forward(self, x: Prepared, weight: Prepared, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
        return super().forward((self._wide(x, weight[0]),), weight, factor, bias)

    def weight_gradient(self, grad: Prepared, x: Prepared, factor: float = 1.0) -> Tensor:
        return super().weight_gradient(grad, (self._wide(x, grad[0]),), factor)

    def _wide(self, x: Prepared, like: Tensor) -> Tensor:
        narrow, size = x
        return narrow.to(like.dtype) * size


NARROW = Narrow()
METHODLESS = object()


@pytest.mark.parametrize("puts_off", [False, True])
def test_an_input_is_prepared_once_for_all_that_share_it_and_kept_like_that(puts_off: bool, mesh: Mesh) -> None:
    made = layers(mesh)
    use_product(torch.nn.ModuleList(made), NARROW)
    gradients = split_backward(torch.nn.ModuleList(made))
    x, casts, saved = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4) / 7, Narrow.casts, []
    x.requires_grad_()
    with saved_tensors_hooks(lambda tensor: (saved.append((tensor.dtype, tensor.shape)), tensor)[1], lambda kept: kept):
        outputs = columns(x, made, mesh.tp.get_group())
    loss = sum(y.square().sum() for y in outputs)
    if puts_off:
        with gradients.put_off() as waiting:
            loss.backward()
        with torch.no_grad():
            for make_gradients in waiting:
                make_gradients()
    else:
        loss.backward()
    assert Narrow.casts == casts + 1
    assert (torch.bfloat16, (3, 2, 4)) in saved
    assert (torch.float64, (3, 2, 4)) not in saved
    cast = NARROW._wide(NARROW.prepare(x.detach()), x)
    for layer, y in zip(made, outputs, strict=True):
        weight = layer.weight.to_local().detach()
        assert torch.equal(y, cast @ weight.t())
        assert layer.weight.grad is not None
        expected = (2 * y.detach()).flatten(0, 1).t() @ cast.flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad.to_local(), expected)


def trained_by(product: str, layout: Layout, schedule: str = "1f1b") -> list[float]:
    config = config_of(layout, schedule=schedule)
    return advance(make(replace(config, train=replace(config.train, product=product))), 0, 3)


@pytest.mark.usefixtures("mesh")
def test_a_key_chooses_the_product_of_every_layer() -> None:
    job = make(config_of(Layout()))
    assert {module.product for module in linears_of(job)} == {PLAIN_PRODUCT}
    config = config_of(Layout())
    job = make(replace(config, train=replace(config.train, product=f"{__name__}:NARROW")))
    assert {module.product for module in linears_of(job)} == {NARROW}
    assert len(linears_of(job)) == 2 * 7


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.usefixtures("mesh")
def test_a_processor_that_prefers_it_trains_by_onednn(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(Layout())
    config = replace(config, train=replace(config.train, precision="fp32", compile=compiles))
    plain, counted, make_onednn = advance(make(config), 0, 3), [], products._onednn
    monkeypatch.setattr(products, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(products, "LEAST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(products, "_onednn", lambda *given: counted.append(given) or make_onednn(*given))
    assert advance(make(config), 0, 3) == pytest.approx(plain, rel=1e-5)
    micro_batches = 3 * config.batch.global_ // config.batch.micro_size
    assert len(counted) == micro_batches * (2 * 7 + 1) * 3  # layers and head; an output, and gradients of both operands


def linears_of(job: Job) -> list[Linear]:
    return [module for stage in job.stages.values() for module in stage.layers.modules() if isinstance(module, Linear)]


def test_all_layouts_train_alike_with_another_product(ranks: Ranks) -> None:
    with one_rank():
        plain, expected = (trained_by(name, Layout()) for name in ("plain", f"{__name__}:NARROW"))
    assert expected != plain
    for layout, schedule in ((Layout(dp_shard=2, tp=2, cp=2), "1f1b"), (Layout(pp=2, dp_shard=2, tp=2), "zb_h1")):
        for found in ranks.run(trained_by, f"{__name__}:NARROW", layout, schedule):
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no_such_module:THING", "cannot be imported: No module named 'no_such_module'"),
        (f"{__name__}:THING", "cannot be imported: module '.*' has no attribute 'THING'"),
        (f"{__name__}:METHODLESS", r"has no prepare\(\), which megalite.parallel.product.Product describes"),
    ],
)
def test_a_product_that_is_none_is_refused(name: str, rule: str) -> None:
    config = config_of(Layout())
    with pytest.raises(InputError, match=f'train.product = "{name}": {rule}; name an object'):
        build_product(replace(config, train=replace(config.train, product=name)))


@pytest.mark.parametrize("name", ["", "float8", "a:b:c", "a.:b", ":b", "a b:c", "/a:b"])
def test_a_name_that_no_product_can_have_is_refused(name: str) -> None:
    config = config_of(Layout())
    (problem,) = train_rules(replace(config, train=replace(config.train, product=name)))
    assert str(problem).startswith(f'train.product = "{name}": must be plain, or')
