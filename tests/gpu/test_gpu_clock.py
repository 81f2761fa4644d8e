"""The clock of a rank's own work on a CUDA device, where events are timed and nothing waits for them."""

import pytest
import torch
import torch.distributed as dist

from megalite.distributed.health.clock import LAG, SectionClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_what_a_stream_waits_for_is_not_counted(one_rank: None) -> None:
    clock, other = SectionClock(torch.device("cuda")), torch.cuda.Stream()
    dist.all_reduce(torch.ones(8, device="cuda"))  # NCCL takes a second to begin
    cycles = 200_000_000  # about a tenth of a second
    found = []
    with clock.running():
        for step in range(LAG + 1):
            with clock.timed("forward"):
                torch.cuda._sleep(cycles)
                with torch.cuda.stream(other):
                    torch.cuda._sleep(4 * cycles)
                    done = other.record_event()
                torch.cuda.current_stream().wait_event(done)
                dist.all_reduce(torch.ones(8, device="cuda"))
            if step == LAG:
                torch.cuda.synchronize()
            found.append(clock.stepped())
    assert found[:-1] == [{}] * LAG
    alone = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    alone[0].record()
    torch.cuda._sleep(cycles)
    alone[1].record()
    torch.cuda.synchronize()
    assert found[-1]["forward"] == pytest.approx(alone[0].elapsed_time(alone[1]) / 1e3, rel=0.3)
