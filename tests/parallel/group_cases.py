"""A toy stage whose parameters are sharded over two meshes, as experts are in expert parallelism."""

from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from megalite.config.layout import Layout
from megalite.config.model_schema import Model
from megalite.config.schema import Optim
from megalite.distributed.mesh import Mesh
from megalite.optim.build import build_optimizer
from megalite.parallel.fsdp import shard
from megalite.parallel.gradients import Gradients
from megalite.parallel.parameter import parameter, part
from megalite.plan.parts.part import Weight
from megalite.plan.parts.roles import DOWN_PROJECTION, GATE, Role
from megalite.train.vital_signs import take_signs

EXPERTS, REPLICAS, WIDTH = 2, 4, 8  # every expert is sharded over ranks of its own
OPTIM = Optim(lr=0.1)
STEPS = 3
Told = tuple[list[float], dict[str, Tensor]]


class Matrix(nn.Module):
    def __init__(self, role: Role, tp: DeviceMesh) -> None:
        super().__init__()
        self.weight = parameter(Weight((WIDTH, WIDTH), role), tp, Replicate())
        self.roles = {"weight": role}

    def forward(self, x: Tensor) -> Tensor:
        return x @ part(self.weight)


class Stage(nn.Module):
    """What all ranks share, and one of the experts."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.shared, self.expert = Matrix(GATE, tp), Matrix(DOWN_PROJECTION, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(x).tanh()).square().sum()


def weights() -> tuple[Tensor, Tensor]:
    """Of the shared matrix, and of all experts."""
    generator = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    return torch.rand(shape, generator=generator).double(), torch.rand((EXPERTS, *shape), generator=generator).double()


def sample(step: int, rank: int) -> Tensor:
    return torch.rand((3, WIDTH), generator=torch.Generator().manual_seed(100 * step + rank)).double() / WIDTH


def trained(mode: str) -> Told:
    """The gradient norms of some steps, and then the weights of the shared matrix and of this rank's expert."""
    mesh = Mesh.build(Layout(dp_replicate=EXPERTS, dp_shard=REPLICAS), torch.device("cpu"))
    assert mesh is not None
    stage, expert = Stage(mesh.tp).double(), mesh.coordinates["dp_replicate"]
    shard(stage, [(stage.expert, mesh.root["fsdp"])], mesh.data, "fp64", mode, "fp32")  # type: ignore[arg-type]
    stage.to_empty(device="cpu")
    shared, experts = weights()
    with torch.no_grad():
        for module, whole in ((stage.shared, shared), (stage.expert, experts[expert])):
            mine = module.weight.to_local()
            mine.copy_(whole.chunk(REPLICAS)[mesh.coordinates["dp_shard"]])
    optimizer = build_optimizer([stage], Model(), OPTIM)
    gradients, norms = Gradients({0: stage}, [0], mesh, shared=False), []
    for step in range(STEPS):
        stage(sample(step, mesh.rank)).backward()
        gradients.finish()
        norms.append(take_signs(mesh, *gradients.counted_norms(), None, ()).norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: param.full_tensor().detach() for name, param in stage.named_parameters()}


def reference() -> tuple[list[float], Tensor, Tensor]:
    """The same by one process: the norms, the shared matrix and all experts."""
    shared, experts = (whole.requires_grad_() for whole in weights())
    first, second = OPTIM.betas
    optimizer = torch.optim.AdamW(
        [shared, experts], OPTIM.lr, (first, second), OPTIM.eps, weight_decay=OPTIM.weight_decay
    )
    norms = []
    for step in range(STEPS):
        for expert, replica in product(range(EXPERTS), range(REPLICAS)):
            x = sample(step, expert * REPLICAS + replica)
            ((x @ shared).tanh() @ experts[expert]).square().sum().backward()
        norms.append(torch.linalg.vector_norm(torch.cat([x.grad.flatten() for x in (shared, experts)])).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, shared.detach(), experts.detach()
