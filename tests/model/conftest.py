"""Fixtures for tests of the model."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megalite.config.layout import Layout
from megalite.dist.mesh import Mesh


@pytest.fixture(scope="module")
def alone() -> Iterator[Mesh]:
    """The mesh of one rank, in the test's own process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    yield mesh
    dist.destroy_process_group()
