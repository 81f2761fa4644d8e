"""All checks of one node, in the order in which they are done."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..base.errors import UserError
from .board import Board, Host, Unreachable
from .findings import FAIL, OK, UNCHECKED, Sheet, read_sheet
from .gpus import check_gpus
from .kernel_log import check_xids
from .pairs import PROBE, adapters_rate, measure_pairs, rank_arguments
from .storage import check_room, check_shm, judge_write, read_back, write
from .thresholds import Limits, Thresholds
from .trainer import Trainer, TrainerError

PREFLIGHT_SECONDS = {"light": 18.0, "full": 165.0}  # seconds a preflight may take; who waits for it allows 20 and 180
BOARD_SECONDS = {"light": 8.0, "full": 30.0}  # seconds until the first node must have begun
VERSIONS = "megalite_launch.preflight.versions"
CPU = "cpu"


@dataclass(frozen=True)
class Order:
    """Order for a preflight: the nodes to check, and how."""

    node: str
    nodes: Sequence[str]  # all that are checked at the same time, in an order that all know; the first keeps the board
    port: int  # port of the board
    level: str  # light or full
    gpus: Optional[int]  # GPUs that the node should have; 0: none, None: as many as there are
    folder: Optional[Path]  # where checkpoints go, if that was told
    checkpoint: Optional[int]  # bytes of one, if known
    attempts: Optional[Path]  # folder of the run's attempts, with the files of earlier preflights
    trainer: Trainer
    write_size: int  # bytes
    probe_size: int  # bytes of an all-reduce and of a copy
    probe_seconds: float  # seconds of matrix products


def check_node(order: Order, thresholds: Thresholds) -> Sheet:
    """Run all checks of this node and return its findings. Raises UserError if it cannot even keep the board."""
    deadline = time.monotonic() + PREFLIGHT_SECONDS[order.level]
    sheet = Sheet(order.node, order.level, gpu=CPU)
    with ExitStack() as stack:
        if len(order.nodes) > 1 and order.node == order.nodes[0]:
            try:
                stack.enter_context(Host(order.port))
            except OSError as error:
                raise UserError(f"--port {order.port}: cannot be listened at: {error.strerror}; give another") from None
            stack.callback(_wait_for_others, order, deadline)
        if order.gpus != 0:
            sheet.gpu = ""
            check_gpus(sheet, order.gpus, thresholds, _corrected_before(order), PREFLIGHT_SECONDS["light"] * 0.6)
        limits = thresholds.of(sheet.gpu)
        if order.gpus != 0:
            check_xids(sheet, limits)
        check_shm(sheet, limits)
        if order.folder is None:
            sheet.add("free space", UNCHECKED, None, "", "where checkpoints go is not known (--run)")
        else:
            check_room(sheet, order.folder, order.checkpoint, limits)
        _versions(sheet, order, deadline)
        _between_nodes(sheet, order, limits, deadline)
    return sheet


def _corrected_before(order: Order) -> dict[str, float]:
    """Corrected ECC errors by GPU, as the latest preflight of this node has counted them."""
    files = order.attempts.glob(f"*/preflight-{order.node}.json") if order.attempts else ()
    times = []
    for path in files:
        with suppress(OSError):
            times.append((path.stat().st_mtime, path))
    for _, path in sorted(times, reverse=True):
        with suppress(UserError):
            counted = read_sheet(path).measured.get("corrected")
            if isinstance(counted, dict):
                return {uuid: float(value) for uuid, value in counted.items() if isinstance(value, (int, float))}
    return {}


def _versions(sheet: Sheet, order: Order, deadline: float) -> None:
    try:
        found = order.trainer.ask(VERSIONS, (), max(1.0, min(10.0, deadline - time.monotonic())))
    except TrainerError as error:
        sheet.add("versions", FAIL, None, "the environment works", f"{' '.join(order.trainer.python)}: {error}")
        return
    sheet.versions.update({name: value for name, value in found.items() if isinstance(value, (str, type(None)))})
    shown = ", ".join(f"{name} {value:.12}" for name, value in sheet.versions.items() if value)
    sheet.add("versions", OK, None, "the environment works", shown)


def _between_nodes(sheet: Sheet, order: Order, limits: Limits, deadline: float) -> None:
    """Run the checks that need other nodes, and in a full preflight those of accelerators, which need no others."""
    with ExitStack() as stack:
        board: Optional[Board] = None
        if len(order.nodes) > 1:
            try:
                board = Board(order.nodes[0], order.port, min(deadline, time.monotonic() + BOARD_SECONDS[order.level]))
                stack.callback(board.close)
                stack.callback(_leave, board, order.node)
                _clock(sheet, board, order.nodes[0])
            except Unreachable as error:
                sheet.add("other nodes", UNCHECKED, None, "", f"{order.nodes[0]} keeps no board: {error}")
        if order.folder is not None:
            _storage(sheet, order, order.folder, limits, board, deadline)
        if order.level == "full":
            gpus = _gpus(sheet, order)
            _probe(sheet, order, gpus, deadline)
            if board is not None and gpus is not None:
                _pairs(sheet, order, limits, board, gpus, deadline)


def _clock(sheet: Sheet, board: Board, reference: str) -> None:
    offset, trip = board.clock()
    sheet.measured["clock"] = {"reference": reference, "offset": offset, "round_trip": trip}
    text = f"{offset * 1e3:+.1f} ms from {reference}, round trip {trip * 1e3:.2f} ms"
    sheet.add("clock", OK, round(offset, 6), "compared between nodes", text)


def _storage(sheet: Sheet, order: Order, folder: Path, limits: Limits, board: Optional[Board], deadline: float) -> None:
    """Write a file, and read that of the node before this one."""
    try:
        written = write(folder, order.node, order.write_size)
    except OSError as error:
        sheet.add("write", FAIL, None, "can be written", f"{folder}: {error.strerror}")
        written = None
    try:
        if written is not None:
            judge_write(sheet, written, order.checkpoint, len(order.nodes), limits)
        if board is None:
            sheet.add("read back", UNCHECKED, None, "the same bytes", "needs another node")
            return
        place = list(order.nodes).index(order.node)
        reader, writer = (order.nodes[(place + step) % len(order.nodes)] for step in (1, -1))
        board.put(f"file:{order.node}", written.note() if written else {"failed": True})
        wait = min(30.0, deadline - time.monotonic() - 3)
        note = board.get(f"file:{writer}", wait)
        if "failed" in note:
            sheet.add("read back", UNCHECKED, None, "the same bytes", f"{writer} could write no file")
        else:
            read_back(sheet, writer, note, max(1.0, min(30.0, deadline - time.monotonic() - 2)), limits)
        board.put(f"read:{writer}", True)
        with suppress(Unreachable):
            board.get(f"read:{order.node}", max(0.0, min(30.0, deadline - time.monotonic() - 1)))
            return
        sheet.add("read by others", UNCHECKED, None, "", f"{reader} has not told that it read this node's file")
    except Unreachable as error:
        sheet.add("read back", UNCHECKED, None, "the same bytes", str(error))
    finally:
        if written is not None:
            with suppress(OSError):
                written.path.unlink()


def _gpus(sheet: Sheet, order: Order) -> Optional[int]:
    """Return the number of GPUs to measure with; 0: on the CPU. None if the GPUs cannot be counted."""
    if order.gpus == 0:
        return 0
    counted = [finding.value for finding in sheet.findings if finding.check == "GPU count"]
    return int(counted[0]) or None if counted else None


def _probe(sheet: Sheet, order: Order, gpus: Optional[int], deadline: float) -> None:
    """Products, copies and all-reduces of all GPUs at once; judged when nodes are compared."""
    if gpus is None:
        sheet.add("probe", UNCHECKED, None, "", "there is no GPU to measure")
        return
    ranks = gpus or 2  # an all-reduce on CPUs needs two
    with tempfile.TemporaryDirectory(prefix="megalite-preflight-") as folder:
        words = [
            [
                *rank_arguments(gpus, place),
                *("--rank", str(place), "--world-size", str(ranks), "--store", str(Path(folder) / "store")),
                *("--seconds", str(order.probe_seconds), "--bytes", str(order.probe_size)),
            ]
            for place in range(ranks)
        ]
        try:
            answers = order.trainer.crew(PROBE, words, min(90.0, max(1.0, deadline - time.monotonic() - 10)))
            _note_probe(sheet, answers)
        except TrainerError as error:
            sheet.add("probe", FAIL, None, "measures in time", f"matrix products, copies or all-reduce: {error}")


def _note_probe(sheet: Sheet, answers: list[Any]) -> None:
    """Raises TrainerError if an answer lacks something."""
    keys = ("matmul", "digest", "steady", "to_device", "to_host")
    if not all(
        isinstance(answer, dict) and {*keys, "all_reduce", "right", "versions"} <= set(answer) for answer in answers
    ):
        raise TrainerError("printed something else than a measurement: is it the same megalite?")
    sheet.measured["gpus"] = [{key: answer[key] for key in keys} for answer in answers]
    sheet.measured["all_reduce"] = min(answer["all_reduce"] for answer in answers)
    sheet.versions.update({name: value for name, value in answers[0]["versions"].items() if value})
    slowest, fastest = (pick(answer["matmul"] for answer in answers) / 1e12 for pick in (min, max))
    sheet.add("probe", OK, None, "measures in time", f"{len(answers)} ranks, {slowest:.3g} to {fastest:.3g} TFLOP/s")
    wrong = [f"GPU {place}" for place, answer in enumerate(answers) if not answer["steady"]]
    text = f"{', '.join(wrong)}: the same product had other bits later" if wrong else "the same product, the same bits"
    sheet.add("steady bits", FAIL if wrong else OK, wrong, "equal", text)
    sums = all(answer["right"] for answer in answers)
    sheet.add(
        "all-reduce sums", OK if sums else FAIL, sums, "right", "right" if sums else "an all-reduce gave wrong sums"
    )


def _pairs(sheet: Sheet, order: Order, limits: Limits, board: Board, gpus: int, deadline: float) -> None:
    found = measure_pairs(order.node, order.nodes, board, order.trainer, gpus, order.probe_size, deadline)
    sheet.measured["pairs"] = found
    known = limits.number("network_gb")
    sheet.measured["network"] = known * 1e9 if known else adapters_rate(gpus)
    told = [
        f"{pair['partner']}: {pair['rate'] / 1e9:.3g} GB/s" if "rate" in pair else f"{pair['partner']}: not measured"
        for pair in found
    ]
    sheet.add("pairs", OK, None, "compared between nodes", ", ".join(told))


def _leave(board: Board, node: str) -> None:
    with suppress(Unreachable):
        board.put(f"left:{node}", True)


def _wait_for_others(order: Order, deadline: float) -> None:
    """The first node keeps the board until all others have left it, or their time is over."""
    with suppress(Unreachable):
        board = Board("127.0.0.1", order.port, deadline)
        try:
            for node in order.nodes[1:]:
                board.get(f"left:{node}", deadline - time.monotonic())
        finally:
            board.close()
