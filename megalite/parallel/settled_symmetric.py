"""Settles whether a run fuses matrix products with collectives of tensor parallelism: its GPUs are asked, and try."""

import socket
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist

from megalite.base.errors import InputError, Problem, counted
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.parallel.symmetric import gathered_products, prepare, scattered_product

KEY = "parallel.tensor.overlap"
TRIED_ROWS, TRIED_WIDTH = 2, 128  # rows of a rank, and features; float32 adds their numbers up exactly


class Fused(NamedTuple):
    """Flag: products are fused with collectives. reason: why not, where `auto` has asked."""

    used: bool
    reason: str = ""


class Place(NamedTuple):
    """The GPU of a rank: its host, its number there as the rank counts, and why it has no symmetric memory, or ""."""

    host: str
    number: int
    lack: str


def fused_products(config: Config, mesh: Mesh) -> Fused:
    """Settle whether layers fuse products with collectives, and have PyTorch get ready for it if so.

    Collective over the mesh, whose ranks all find the same. Raises InputError where it is asked for and cannot be.
    """
    asked = config.parallel.tensor.overlap
    if not config.fuses_over_tp:
        return Fused(False)
    if mesh.device.type == "cuda":
        reason = _refusal(mesh)
    else:
        reason = "a CPU has no symmetric memory" if asked == "auto" else ""
    if reason and asked == "symmetric":
        fix = "use pieces, or auto, which takes pieces there"
        raise InputError([Problem(KEY, f"cannot be used here: {reason}", fix, asked)])
    return Fused(not reason, reason)


def _refusal(mesh: Mesh) -> str:
    """Say why ranks of tensor parallelism cannot use symmetric memory; "" if they can. Collective over the mesh."""
    here = Place(socket.gethostname(), mesh.device.index, _lack(mesh.device))
    places = [here] * mesh.layout.world_size
    dist.all_gather_object(places, here, group=mesh.world)
    group = mesh.group("tp")
    own = [places[rank] for rank in dist.get_process_group_ranks(group)]
    # All ranks know all places, but a rank can ask its own GPU alone.
    if told := _first(mesh, reason_of_places(own) or _without_access(here, own)):
        return told
    return _first(mesh, _tried(group, mesh.device))


def _first(mesh: Mesh, found: str) -> str:
    """Return the text of the first rank that has `found` any, or "". Collective over the mesh."""
    everywhere = [""] * mesh.layout.world_size
    dist.all_gather_object(everywhere, found, group=mesh.world)
    return next(filter(None, everywhere), "")


def _lack(device: torch.device) -> str:
    """Say why PyTorch has no symmetric memory for a device; "" if it has."""
    prepare()
    backend = import_module("torch.distributed._symmetric_memory").get_backend(device)
    return "" if backend else f"PyTorch {torch.__version__} has no symmetric memory for {device.type}"


def reason_of_places(places: Sequence[Place]) -> str:
    """Say why ranks in these places have no memory in common; "" if they may have."""
    hosts = {place.host for place in places}
    if len(hosts) > 1:
        return f"ranks of tensor parallelism are on {counted(len(hosts), 'node')}: {', '.join(sorted(hosts))}"
    return next((place.lack for place in places if place.lack), "")


def _without_access(here: Place, places: Sequence[Place]) -> str:
    """Name a GPU that a rank cannot read from, among those that it sees; "" if it sees none."""
    for place in places:
        # Ranks of which each sees its own GPU alone all call it 0: trying will tell.
        if place.number == here.number or place.number >= torch.cuda.device_count():
            continue
        if not torch.cuda.can_device_access_peer(here.number, place.number):
            return f"GPU {here.number} of {here.host} cannot read the memory of GPU {place.number}"
    return ""


def _tried(group: dist.ProcessGroup, device: torch.device) -> str:
    """Run both operations on a few numbers. Returns what is wrong; "" if nothing is. Collective over the group."""
    ranks = group.size()
    try:
        with warnings.catch_warnings():
            # From PyTorch 2.15 on every group has symmetric memory; before, the compiler looks whether it was enabled.
            warnings.simplefilter("ignore", FutureWarning)
            import_module("torch.distributed._symmetric_memory").enable_symm_mem_for_group(group.group_name)
        x = torch.full((TRIED_ROWS, 1, TRIED_WIDTH), group.rank() + 1.0, device=device)
        weight = torch.ones(TRIED_WIDTH, TRIED_WIDTH, device=device)
        _, (gathered,) = gathered_products(x, [weight], group)
        scattered = scattered_product(x.repeat(ranks, 1, 1), weight, group)
        numbers = torch.arange(1.0, ranks + 1, device=device).repeat_interleave(TRIED_ROWS)
        right = torch.equal(gathered, (numbers * TRIED_WIDTH)[:, None, None].expand_as(gathered))
        summed = TRIED_WIDTH * ranks * (ranks + 1) / 2
        right = right and torch.equal(scattered, torch.full_like(x, summed))
    except (RuntimeError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return "" if right else "PyTorch's operations on it gave a wrong result"
