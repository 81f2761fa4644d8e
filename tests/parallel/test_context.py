"""Context parallelism gives what unsplit attention with an explicit mask gives."""

from context_cases import all_differences
from ranks import Ranks


def test_every_method_gives_the_output_and_gradients_of_unsplit_attention(ranks: Ranks) -> None:
    told = ranks.run(all_differences)[0]
    assert len(told) == 72
    assert [(case, found) for case, found in told if len(found) != 4 or not max(found) < 1e-13] == []
