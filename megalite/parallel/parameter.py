"""Parameters, which are DTensors on the `tp` mesh, and their plain local tensors, with which layers compute."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import Role
from megalite_kernels.nf4 import packed_shape, values_shape

# Attributes of a parameter with which layers do not compute themselves, see `copies`.
COPY = "copy_for_compute"
DIVIDED = "divided_shape"  # the shape that its mesh divides, on a tensor that is `cut`: with padding
JOINT = "joint_copy"  # on the first of several whose copies lie one after another: their `Joint`


def parameter(weight: Weight, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter that `weight` describes, without values: this rank's part is on the meta device.

    All ranks have equally large parts. So a vocabulary is padded, see `Parameter.shape`.
    One in four bits has the bytes of `megalite_kernels.nf4` for its values.
    """
    shape = list(weight.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] = mesh.size() * weight.share(placement.dim, mesh.size())
    if weight.four_bits:
        return nn.Parameter(placed(packed_shape(*shape), mesh, placement, torch.uint8), requires_grad=False)
    return nn.Parameter(placed(shape, mesh, placement), requires_grad=weight.trained)


def placed(shape: Sequence[int], mesh: DeviceMesh, placement: Placement, dtype: torch.dtype | None = None) -> DTensor:
    """A tensor of global `shape`, laid out as a `parameter` is. As a buffer with a role, it is `extra_state`."""
    part = list(shape)
    if isinstance(placement, Shard):
        part[placement.dim] //= mesh.size()
    local = torch.empty(part, device="meta", dtype=dtype)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def whole(param: Tensor) -> Tensor:
    """A replicated parameter as a plain tensor, for use with this rank's part of the sequence or heads.

    Each rank then computes a part of the gradient, though it is placed as the parameter is: if it were declared
    partial, FSDP2 would sum every parameter's alone. All are summed at once when gradients are finished.
    """
    return part(param)


def in_four_bits(weight: Tensor) -> bool:
    """Return whether a weight, or a part of one, has the bytes of values in four bits."""
    return weight.dtype == torch.uint8


def part(param: Tensor | None) -> Tensor:
    """The part of a sharded parameter on this rank, as a plain tensor."""
    assert isinstance(param, DTensor)
    return _local(param)


def copy_of(param: Tensor) -> Tensor | None:
    """The copy of a parameter with which layers compute, if there is one."""
    copy: Tensor | None = getattr(param, COPY, None)
    return copy


def in_use(param: DTensor) -> Tensor:
    """The local tensor with which layers compute, outside of autograd: the copy of `param` or its own."""
    copy = copy_of(param)
    return param._local_tensor if copy is None else copy


class Joint(NamedTuple):
    """Copies of weights that share an input, as one weight, and of their biases: the rows of one after another's."""

    weight: Tensor
    bias: Tensor | None
    rows: list[int]  # in each weight


def joint_copy(params: Sequence[Tensor]) -> Joint | None:
    """The copies of weights that share an input, all of them in their order, if they lie one after another."""
    joint: Joint | None = getattr(params[0], JOINT, None)
    return joint if len(params) > 1 else None


class Parameter(NamedTuple):
    """One parameter of a stage, or one tensor of its extra state."""

    name: str  # in the whole model
    value: DTensor
    role: Role
    shape: tuple[int, ...]  # without the rows of padding at the end, which begin as 0 and have no gradients

    @property
    def four_bits(self) -> bool:
        """Flag: the tensor has the bytes of values in four bits, see `megalite_kernels.nf4`."""
        return in_four_bits(self.value)

    def values(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shape of the values in four bits, that of this rank's part of them, and the place of its first."""
        sizes, first = box(self.value)
        return values_shape(*self.shape), values_shape(*sizes), values_shape(*first)


def parameters(stage: nn.Module) -> Iterator[Parameter]:
    """All parameters of `stage`, with the roles that their modules give them. Raises KeyError if one has no role."""
    for prefix, module in stage.named_modules():
        yield from _with_roles(module, module.named_parameters(prefix, recurse=False))


def extra_state(stage: nn.Module) -> Iterator[Parameter]:
    """The tensors of `stage` that are neither parameters nor an optimizer's: its buffers, with roles as `parameters`.

    Checkpoints hold them. Buffers are no parameters to FSDP2: they are alike on all data-parallel ranks, which is up to
    whoever changes them.
    """
    for prefix, module in stage.named_modules():
        yield from _with_roles(module, module.named_buffers(prefix, recurse=False))


def _with_roles(module: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[Parameter]:
    for name, value in named:
        assert isinstance(value, DTensor)
        shape = (getattr(module, "rows", value.shape[0]), *value.shape[1:])
        yield Parameter(name, value, module.roles[name.rpartition(".")[2]], shape)


def trainable(stage: nn.Module) -> Iterator[Parameter]:
    """The parameters of `stage` that training changes, `Weight.trained`."""
    return (found for found in parameters(stage) if found.value.requires_grad)


def cut(tensor: Tensor, shape: tuple[int, ...]) -> DTensor:
    """A view without padding of `tensor`, a parameter or something of its size. `box` returns where its parts are; a
    DTensor's own rule would divide the rows that are left anew."""
    assert isinstance(tensor, DTensor)
    # A DTensor's own `detach` gives the part another version, so `copies` would not see what is written to it.
    spec, local = tensor._spec, tensor._local_tensor.detach()
    if tuple(tensor.shape) != shape:
        assert spec.tensor_meta is not None
        local = local[: max(shape[0] - box(tensor)[1][0], 0)]
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta._replace(shape=torch.Size(shape)))
    made = dtensor(local, spec)
    setattr(made, DIVIDED, getattr(tensor, DIVIDED, tuple(tensor.shape)))
    return made


def box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of this rank's part of a parameter, also of a `cut` one, and its first element's place in the whole."""
    mesh, whole, sizes = tensor.device_mesh, tensor.shape, tuple(tensor.to_local().shape)
    parts, first = list(getattr(tensor, DIVIDED, whole)), [0] * len(whole)
    axes = zip(tensor.placements, mesh.get_coordinate() or (), mesh.shape, strict=True)
    # FSDP2 cuts the tensor-parallel part once more, though FSDP2's mesh axis is first: a strided shard.
    for placement, position, ranks in sorted(axes, key=lambda axis: hasattr(axis[0], "split_factor")):
        if (dim := getattr(placement, "dim", None)) is not None:
            before, parts[dim] = parts[dim], -(-parts[dim] // ranks)
            first[dim] += min(position * parts[dim], before)
    return sizes, tuple(at if size else end for at, size, end in zip(first, sizes, whole, strict=True))


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A tensor without gradient of which this rank has `local`.

    Made without `DTensor.__init__`, which does nothing, but only after twenty calls of Dynamo.
    """
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def add_gradient(param: DTensor, grad: Tensor) -> None:
    """Add `grad`, a local gradient, to that of a sharded parameter, as autograd would."""
    if param.grad is None:
        # From PyTorch 2.15 on, FSDP2 may demand the data type of its reduction.
        if grad.dtype != (dtype := param.grad_dtype or grad.dtype):
            wide = torch.empty_like(grad, dtype=dtype)
            put(wide, grad)
            grad = wide
        param.grad = dtensor(grad, param._spec)
    else:
        assert isinstance(param.grad, DTensor)
        param.grad._local_tensor.add_(grad)


def put(total: Tensor, grad: Tensor) -> None:
    """Write `grad` to `total`, of perhaps another data type. On a GPU, `copy_` then takes half as long again."""
    torch._foreach_copy_([total], [grad])


def sum_of_gradients(param: DTensor) -> tuple[Tensor, bool]:
    """The local gradient of a parameter, and whether it has values: a missing gradient is allocated, uninitialized."""
    if has_values := param.grad is not None:
        assert isinstance(param.grad, DTensor)
    else:
        param.grad = dtensor(torch.empty_like(param._local_tensor), param._spec)
    return param.grad._local_tensor, has_values


def _local(param: DTensor) -> Tensor:
    """The local tensor of `param`. The gradient that reaches `param` is a DTensor with its placement."""
    copy: Tensor | None = getattr(param, COPY, None)
    if copy is not None:
        return copy
    if torch.compiler.is_compiling():  # it cannot trace _Local, and runs the checks of to_local only once
        return param.to_local(grad_placements=param.placements)
    if not torch.is_grad_enabled():
        return param._local_tensor
    return _Local.apply(param)


class _Local(torch.autograd.Function):
    """`DTensor.to_local` without the checks in backward, which take the host longer than a small matrix product."""

    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.spec = param._spec
        ctx.set_materialize_grads(False)
        local = param.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> DTensor | None:
        if grad is None:  # the gradient was put off
            return None
        return dtensor(grad.contiguous(), ctx.spec)
