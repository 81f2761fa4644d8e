"""What nodes do together: the board, clocks, and pairs of them."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite_launch.preflight import pairs
from megalite_launch.preflight.board import Board, Host, Unreachable
from megalite_launch.preflight.pairs import adapters_rate, measure_pairs, rounds
from megalite_launch.preflight.trainer import Trainer, TrainerError


@pytest.fixture
def board() -> Iterator[Board]:
    with Host(0) as host:
        board = Board("127.0.0.1", host.port, time.monotonic() + 5)
        yield board
        board.close()


def test_a_note_is_seen_by_others_who_wait_for_it(board: Board) -> None:
    host, port = board._where.split(":")
    other = Board(host, int(port), time.monotonic() + 5)
    threading.Timer(0.1, lambda: other.put("a", {"b": [1, None]})).start()
    assert board.get("a", 5.0) == {"b": [1, None]}
    with pytest.raises(Unreachable, match="no c after 0 s"):
        board.get("c", 0.05)
    other.close()


def test_a_board_that_is_not_there_is_waited_for_and_then_told() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(Unreachable, match=f"127.0.0.1:{port} cannot be reached"):
        Board("127.0.0.1", port, start + 0.3)
    assert time.monotonic() - start >= 0.3


def test_a_board_that_is_taken_away_is_told() -> None:
    with Host(0) as host:
        board = Board("127.0.0.1", host.port, time.monotonic() + 5)
        board.put("a", 1)
        board._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Unreachable):
            board.get("a", 1.0)
        board.close()


def test_a_peer_that_talks_nonsense_does_not_disturb_the_board(board: Board) -> None:
    host, port = board._where.split(":")
    with socket.create_connection((host, int(port)), 5) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.recv(100) == b""
    board.put("a", 1)
    assert board.get("a", 1.0) == 1


@pytest.mark.parametrize("off", [-7.5, 0.0, 0.2])
def test_a_clock_that_is_off_is_measured(board: Board, monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    right, mine = time.time, threading.get_ident()
    monkeypatch.setattr(time, "time", lambda: right() + (off if threading.get_ident() == mine else 0.0))
    offset, trip = board.clock()
    assert 0 < trip < 0.5
    assert abs(offset - off) <= trip / 2 + 1e-4


@pytest.mark.parametrize("n", range(2, 12))
def test_every_node_is_in_two_pairs_and_never_in_two_at_once(n: int) -> None:
    nodes = [f"n{place}" for place in range(n)]
    found = rounds(nodes)
    assert len(found) == 2 + n % 2
    for pairs_of_round in found:
        busy = [node for pair in pairs_of_round for node in pair]
        assert len(set(busy)) == len(busy)
    partners = {node: [set(pair) - {node} for r in found for pair in r if node in pair] for node in nodes}
    assert all(len(some) == 2 for some in partners.values())
    assert n == 2 or all(first != second for first, second in partners.values())


def test_one_node_has_no_pair() -> None:
    assert rounds(["n1"]) == []


def test_adapters_are_added_up_as_many_as_there_are_gpus(tmp_path: Path) -> None:
    def port(name: str, state: str, rate: str) -> None:
        folder = tmp_path / name / "ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
        (folder / "rate").write_text(rate)

    assert adapters_rate(8, tmp_path) is None
    port("mlx5_0", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n")
    port("mlx5_1", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n")
    port("mlx5_2", "1: DOWN\n", "400 Gb/sec (4X NDR)\n")
    port("mlx5_3", "4: ACTIVE\n", "100 Gb/sec (4X EDR)\n")
    port("mlx5_4", "4: ACTIVE\n", "strange\n")
    assert adapters_rate(8, tmp_path) == 112.5e9
    assert adapters_rate(2, tmp_path) == 100e9
    assert adapters_rate(0, tmp_path) == 50e9


def together(board: Board, nodes: list[str], trainer: Trainer, seconds: float) -> dict[str, list[dict[str, object]]]:
    """What the nodes find when they measure at the same time."""
    found: dict[str, list[dict[str, object]]] = {}
    host, port = board._where.split(":")

    def one(node: str) -> None:
        own = Board(host, int(port), time.monotonic() + 5)
        found[node] = measure_pairs(node, nodes, own, trainer, 0, 2**16, time.monotonic() + seconds)
        own.close()

    threads = [threading.Thread(target=one, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_nodes_measure_a_real_all_reduce_between_them(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(pairs, "rounds", lambda nodes: [[tuple(nodes)]])
    nodes = ["127.0.0.1", "127.0.0.2"]
    found = together(board, nodes, Trainer((sys.executable,)), 90.0)
    assert [len(found[node]) for node in nodes] == [1, 1]
    for node, partner in zip(nodes, reversed(nodes), strict=True):
        (pair,) = found[node]
        assert pair["partner"] == partner
        assert 1e5 < float(str(pair.get("rate"))) < 1e12, pair


def script(tmp_path: Path, body: str) -> Trainer:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Trainer((str(path),))


def test_a_pair_whose_probe_fails_says_why_and_its_partner_may_not_come(board: Board, tmp_path: Path) -> None:
    trainer = script(tmp_path, "echo NCCL error >&2; exit 1")
    found = together(board, ["n1", "n2"], trainer, 20.0)
    assert [pair["error"] for pair in found["n1"]] == ["ended with 1: NCCL error"] * 2
    alone = measure_pairs("n3", ["n3", "n4"], board, trainer, 0, 2**16, time.monotonic() + 0.3)
    assert "no pair:0:n3:n4:ready:1" in str(alone[0]["absent"])


def test_wrong_sums_are_an_error(board: Board, tmp_path: Path) -> None:
    trainer = script(tmp_path, """echo '{"all_reduce": 1e9, "right": false}'""")
    found = together(board, ["n1", "n2"], trainer, 20.0)
    assert found["n2"][0]["error"] == "the all-reduce gave wrong sums"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo hello", "printed 'hello' where JSON should be"),
        ("true", "printed '' where JSON should be"),
        ("echo '{\"x\": NaN}'", "where JSON should be"),
        ("echo Traceback >&2; echo oh no >&2; exit 7", "ended with 7: oh no"),
        ("sleep 60", "not done after 0 s"),
    ],
)
def test_a_program_that_fails_is_told_and_ended(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(TrainerError) as error:
        script(tmp_path, body).ask("module", [], 0.2 if "sleep" in body else 10.0)
    assert problem in str(error.value)


def test_programs_that_wait_for_one_that_failed_are_ended(tmp_path: Path) -> None:
    trainer = script(tmp_path, f'echo $$ >{tmp_path}/pid.$3; [ "$3" = b ] || exec sleep 60; sleep 0.3; exit 3')
    start = time.monotonic()
    with pytest.raises(TrainerError, match="ended with 3"):
        trainer.crew("module", [["a"], ["b"]], 30.0)
    assert time.monotonic() - start < 10
    assert not Path(f"/proc/{(tmp_path / 'pid.a').read_text().strip()}").exists()


def test_a_python_that_is_not_there_is_told() -> None:
    with pytest.raises(TrainerError, match=r"/none/python cannot be started: No such file"):
        Trainer(("/none/python",)).ask("module", [], 1.0)
