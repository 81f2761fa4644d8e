"""What this machine has for ranks."""

from pathlib import Path

import pytest

from megalite.base.errors import InputError
from megalite.distributed.start import host


def test_the_memory_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.host_memory()
    limits = [tmp_path / "max", tmp_path / "limit", tmp_path / "absent"]
    limits[0].write_text("max\n")
    limits[1].write_text("1234567\n")
    monkeypatch.setattr(host, "LIMIT_FILES", limits)
    assert host.host_memory() == 1234567 < whole


def test_more_ranks_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: 3 * host.RANK_BYTES)
    host.check_ranks(3)
    with pytest.raises(InputError, match=r"4 ranks need 160 MiB, at least 40 MiB each, and this machine has 120 MiB"):
        host.check_ranks(4)
