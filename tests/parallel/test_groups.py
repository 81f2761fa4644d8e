import group_cases
import pytest
import torch
from ranks import Ranks


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
def test_groups_of_parameters_have_meshes_of_their_own(mode: str, ranks: Ranks) -> None:
    """Each expert is on some ranks only, the rest on all: gradient norms and weights are those of one process."""
    norms, shared, experts = group_cases.reference()
    for rank, (found, weights) in enumerate(ranks.run(group_cases.trained, mode)):
        assert found == pytest.approx(norms, rel=1e-12)
        torch.testing.assert_close(weights["shared.weight"], shared, rtol=0, atol=1e-12)
        expert = experts[rank // group_cases.REPLICAS]
        torch.testing.assert_close(weights["expert.weight"], expert, rtol=0, atol=1e-12)
