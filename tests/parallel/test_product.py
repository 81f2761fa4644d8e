"""Other matrix products take the place of PyTorch's, and weights that are not trained get no gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from toy_jobs import advance, config_of, make, one_rank

from megalite.checkpoint.state import State
from megalite.config.layout import Layout
from megalite.dist.mesh import Mesh
from megalite.parallel.product import Plain
from megalite.parallel.tensor import ColumnLinear, columns, split_backward
from megalite.plan.roles import UP


class Apart(Plain):
    """Products that tell apart which of the three was taken."""

    def forward(self, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
        return 2 * super().forward(x, weight, factor)

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None, factor: float = 1.0) -> Tensor:
        return 3 * super().input_gradient(grad, weight, None, factor) + (0 if total is None else total)

    def weight_gradient(self, grad: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        return 5 * super().weight_gradient(grad, x, factor)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with one_rank():
        found = Mesh.build(Layout(), torch.device("cpu"))
        assert found is not None
        yield found


def layers(mesh: Mesh) -> list[ColumnLinear]:
    made = [ColumnLinear(4, width, mesh.tp, UP).double().to_empty(device="cpu") for width in (3, 2)]
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


@pytest.mark.parametrize("puts_off", [False, True])
def test_a_weight_that_is_not_trained_gets_no_gradient(puts_off: bool, mesh: Mesh) -> None:
    of_x, _, (_, second) = through(layers(mesh), mesh)
    made = layers(mesh)
    made[0].weight.requires_grad_(False)
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


def test_a_job_trains_what_is_to_be_trained_and_nothing_else() -> None:
    frozen = {"embed.weight", "layers.0.mlp.up.weight", "layers.0.attention_norm.weight"}
    job = make(config_of(Layout()))
    before = {name: param.full_tensor().clone() for name, param in job.named_parameters()}  # type: ignore[attr-defined]
    for name, param in job.named_parameters():
        param.requires_grad_(name not in frozen)
    advance(job, 0, 2)
    kept = {name for name, param in job.named_parameters() if torch.equal(before[name], param.full_tensor())}  # type: ignore[attr-defined]
    assert kept == frozen
    saved = State(job.stages, job.optimizer).tensors()
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == before.keys()
    moments = {name.split(".", 2)[2] for name in saved if name.startswith("optimizer.")}
    assert moments == before.keys() - frozen
