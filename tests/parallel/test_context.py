"""Context parallelism gives what unsplit attention with a mask gives, for the traffic and memory that it promises."""

from context_cases import all_differences, all_peaks, all_traffic, cases, windows_traffic
from ranks import Ranks

from megalite.parallel.sequence import Method

PART = 64 * 2 * 2 * 8 * 8  # bytes of the keys of 64 positions of two samples, with 2 heads of 8 numbers in float64


def test_every_method_gives_the_output_and_gradients_of_unsplit_attention(ranks: Ranks) -> None:
    told = ranks.run(all_differences)[0]
    assert [case for case, _ in told] == cases()
    assert [(case, found) for case, found in told if len(found) != 4 + case.kind.sinks or not max(found) < 1e-13] == []


def test_the_bytes_sent_are_those_predicted(ranks: Ranks) -> None:
    told = ranks.run(all_traffic)
    assert len(told[0]) == 12
    assert [
        (case, found) for answers in told for case, found in answers.items() if found and found[0] != found[1]
    ] == []
    assert None not in told[0].values()


def test_with_a_window_the_rank_that_sends_most_sends_what_is_predicted(ranks: Ranks) -> None:
    told = ranks.run(windows_traffic)
    for case in told[0]:
        sent, predicted = zip(*(answers[case] for answers in told if answers[case]), strict=True)
        assert (max(forward for forward, _ in sent), max(backward for _, backward in sent)) == predicted[0], case


def test_the_ring_holds_the_keys_of_no_more_than_a_few_ranks(ranks: Ranks) -> None:
    found: dict[tuple[Method, int, int | None], int] = ranks.run(all_peaks)[0]
    assert found["ring", 4, None] == found["ring", 8, None]
    assert found["all_gather", 8, None] - found["all_gather", 4, None] > 4 * 2 * PART
    assert found["ring", 4, 16] == found["ring", 8, 16] == found["all_gather", 8, 16]
