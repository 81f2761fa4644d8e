"""Where ranks meet. The ranks are threads of this process."""

import os
import resource
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megalite.base.errors import InputError
from megalite.distributed.start import meeting
from megalite.distributed.start.local import MEETING
from megalite.distributed.start.meeting import LostPeer, kept, meet, reason
from megalite.distributed.start.ranks import RankInfo
from megalite_launch.base.outcome import have_met
from megalite_launch.base.run_folder import ATTEMPT

RATE = {"optim.lr": 0.1, "data.train[0].weight": 1.0}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port at which ranks started by nobody in particular will meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    for name in (MEETING, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    environment = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return port


def outcomes(*ranks: Callable[[], Any]) -> list[Any]:
    """What ranks that run at the same time return or raise."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures: list[Future[Any]] = [pool.submit(rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize(
    ("facts", "size", "told"),
    [
        (RATE | {"optim.lr": 0.2}, 2, "optim.lr = 0.2 here, 0.1 there;"),
        ({"optim.lr": 0.1}, 2, "data.train[0].weight = None here, 1.0 there;"),
        (RATE, 4, "ranks = 4 here, 2 there;"),
        (RATE | {"a": 1, "b": 2, "c": 3, "d": 4}, 2, "a = 1 here, None there; b = 2 here, None there; c = 3 here,"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_the_others_meet(
    facts: dict[str, Any], size: int, told: str, port: int
) -> None:
    keeper, refused, peer = outcomes(
        partial(meet, RankInfo(0, 2, 0), 60.0, RATE),
        partial(meet, RankInfo(1, size, 1), 60.0, facts),
        lambda: meet(RankInfo(1, 2, 1), 60.0, RATE),
    )
    assert isinstance(refused, InputError)
    here = socket.gethostname()
    assert f"rank 1 on {here} is not of the job of rank 0 on {here}, met by rank 0 at 127.0.0.1:{port}" in str(refused)
    assert told in str(refused)
    assert str(refused).endswith("each job its own MASTER_PORT")
    assert [keeper.deputy, peer.deputy, peer.host] == [1, 1, here]
    assert peer.keeper == f"rank 0 at 127.0.0.1:{port}"


@pytest.mark.parametrize(("module", "name"), [(meeting, "megalite"), (torch, "torch")])
def test_ranks_of_other_versions_are_refused(
    module: Any, name: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, RankInfo(0, 2, 0), 1.0)
        store = dist.TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
        dist.PrefixStore("attempt 0", store).get("job")  # rank 0 has told its versions
        monkeypatch.setattr(module, "__version__", "0.0")
        with pytest.raises(InputError, match=f"{name} = '0.0' here, "):
            meet(RankInfo(1, 2, 1), 60.0)
        assert isinstance(first.exception(), LostPeer)


@pytest.mark.parametrize("told", ["Connection refused", "Name or service not known"])
def test_people_are_told_what_a_rank_waits_for(
    told: str, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.1)
    if told.startswith("Name"):  # a real look-up may take long
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, told)))
    with pytest.raises(LostPeer) as caught:
        meet(RankInfo(1, 2, 1), 0.5)
    problem = f"rank 0 at 127.0.0.1:{port} did not answer ({told}) within "
    assert str(caught.value) == f"{problem}0.5 s (train.timeout)"
    waits = f"{problem}0.1 s; it gives up after 0.5 s (train.timeout)"
    assert capfd.readouterr().err == f"megalite: warning: rank 1 waits: {waits}\n"


def test_the_absent_are_named_while_and_after_the_others_wait(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "QUIET_SECONDS", 0.1)
    ended = outcomes(*(partial(meet, RankInfo(rank, 4, rank), 0.7) for rank in (0, 2)))
    assert sorted(str(error) for error in ended)[0].startswith("rank 1, 3 did not come within 0.7 s")
    assert capfd.readouterr().err.count("waits: rank 1, 3 did not come within 0.1 s; it gives up after 0.7 s") == 1


@pytest.mark.parametrize(
    ("interface", "found", "warned"), [("", "127.0.1.1", True), ("", "10.0.0.7", False), ("eth0", "127.0.1.1", False)]
)
def test_a_host_that_others_cannot_reach_by_its_name_is_told(
    interface: str, found: str, warned: bool, port: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    names, resolve = count(), socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{next(names)}")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: resolve(found if host.startswith("node") else host, *rest)
    )
    if not interface:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    ranks = outcomes(*(partial(meet, RankInfo(rank, 2, 0), 20.0) for rank in (0, 1)))
    assert ranks[0].deputy == 1
    assert capfd.readouterr().err.count("set GLOO_SOCKET_IFNAME to the network interface") == 2 * warned


@pytest.mark.parametrize("text", ["", "0", "-1", "65536", "x", "1e3", "29500.0"])
def test_a_port_is_a_number_that_can_be_one(text: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(InputError, match=r"^MASTER_PORT"):
        meet(RankInfo(0, 1, 0), 1.0)


def test_a_port_in_use_is_told(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(InputError, match=f"MASTER_PORT = {port}: rank 0 cannot listen there, choose another; "):
            meet(RankInfo(0, 2, 0), 1.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["a..b", "x" * 80, "a." + "x" * 64 + ".b"])
def test_what_cannot_be_a_host_is_refused_at_once(
    name: str, rank: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", name)
    with pytest.raises(InputError, match=f"^MASTER_ADDR = {name}: must be the name or address of a host"):
        meet(RankInfo(rank, 2, rank), 60.0)


def test_a_host_that_rank_0_does_not_know_is_not_a_wrong_port(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    with pytest.raises(
        InputError, match=r"^MASTER_ADDR = 127.0.0.1: Name or service not known; name the host of rank 0"
    ):
        meet(RankInfo(0, 2, 0), 60.0)
    assert capfd.readouterr().err == ""


def test_a_host_that_is_not_that_of_rank_0_is_not_a_wrong_port(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = dist.DistNetworkError("The client socket has timed out after 60000ms. More")
    monkeypatch.setattr(dist, "TCPStore", Mock(side_effect=elsewhere))
    with pytest.raises(
        InputError, match=r"^MASTER_ADDR = 127.0.0.1: must be the host of rank 0: .*; The client socket"
    ):
        meet(RankInfo(0, 2, 0), 60.0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[/build/pair.cc:553] Connection closed by peer [127.0.0.1]:1", "Connection closed by peer [127.0.0.1]:1"),
        ("failed to recv, got 0 bytes. Exception raised\nframe #0", "failed to recv, got 0 bytes"),
        ("\n", "DistNetworkError"),
        ("[", "["),
    ],
)
def test_a_reason_is_one_line_and_never_empty(text: str, shown: str) -> None:
    assert reason(dist.DistNetworkError(text)) == shown


def test_a_full_disk_at_the_end_does_not_abort_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of a file store writes."""
    monkeypatch.setenv(MEETING, str(tmp_path))
    if (pid := os.fork()) == 0:
        stores = [kept(dist.FileStore(str(tmp_path / "store"), 1))]
        stores += [kept(store.clone()) for store in (stores[0], dist.PrefixStore("host", stores[0]))]  # type: ignore[attr-defined]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        stores.clear()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_that_all_have_met_is_noted_for_the_supervisor(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    alone = outcomes(partial(meet, RankInfo(0, 2, 0), 0.3))
    assert isinstance(alone[0], LostPeer)
    assert not have_met(tmp_path)
    monkeypatch.setenv("MASTER_PORT", str(port + 1))
    outcomes(partial(meet, RankInfo(0, 2, 0), 60.0), partial(meet, RankInfo(1, 2, 1), 60.0))
    assert have_met(tmp_path)
