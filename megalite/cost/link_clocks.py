"""Time that a rank's links are busy with what it sends: a clock for each link, of one direction. Imports no torch.

Transfers are those of `plan.traffic`. The same wires carry all of them, whatever they run beside.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from megalite.config.layers import LayerKind
from megalite.config.schema import Config
from megalite.cost.network import Collective, Group, Kind, Links, Net
from megalite.plan.model.weights import embedding_weights, head, head_weights
from megalite.plan.parts.layer import Layer
from megalite.plan.parts.part import Weight
from megalite.plan.parts.transfers import Transfers, axis_sizes
from megalite.plan.recompute_modes import Mode
from megalite.plan.traffic.layers import LayerTraffic
from megalite.plan.traffic.weights import Group as Weights

End = Literal["embedding", "head"]
Part = LayerKind | End  # a unit that FSDP2 gathers and reduces at once
KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Collective)} | {"send": "messages"}  # by kind of transfer


def groups(config: Config) -> dict[str, Group]:
    """The ranks that communicate over each axis of `plan.parts.transfers.axis_sizes`."""
    layout, sizes = config.parallel.layout, axis_sizes(config)
    strides = {
        "cp": layout.tp,
        "fsdp": layout.tp,
        "dp_replicate": layout.tp * sizes["fsdp"],
        "ep_fsdp": layout.ep,
        "ep_replicate": layout.ep * sizes["ep_fsdp"],
        "pp": layout.world_size // layout.pp,
    }
    return {axis: Group(size, strides.get(axis, 1)) for axis, size in sizes.items()}


def kind_of(transfer: str) -> Kind | None:
    """Name of a transfer in the network's times; None for one that another rank sends."""
    return KINDS.get(transfer)


def total(links: Iterable[Links]) -> Links:
    """Sum of several, one after another."""
    return tuple(map(sum, zip(*links, strict=True)))


def times(links: Links, count: float) -> Links:
    """Clocks of `links`, `count` times as far."""
    return tuple(count * each for each in links)


def layer_links(config: Config, net: Net, kind: LayerKind, mode: Mode) -> tuple[Links, Links]:
    """Links in forward and backward of a layer, on the busiest rank of context parallelism: at windows they differ."""
    ring = range(config.parallel.cp) if kind.attention.heads.scores.window is not None else range(1)
    traffic = [LayerTraffic(config, at) for at in ring]
    there = [_busy(each.forward(kind), config, net) for each in traffic]
    back = [_busy(each.backward(kind, mode, split=False), config, net) for each in traffic]
    return tuple(map(max, zip(*there, strict=True))), tuple(map(max, zip(*back, strict=True)))


def end_links(config: Config, net: Net, end: End) -> tuple[Links, Links]:
    """Links in forward and backward of the embedding or of the head."""
    traffic = LayerTraffic(config, 0)
    there, back = traffic.embedding() if end == "embedding" else traffic.head()
    return _busy(there, config, net), _busy(back, config, net)


def exchanged(config: Config, part: Part) -> list[Weights]:
    """The weights of a part, of each group that FSDP2 exchanges at once."""
    model, layout = config.model, config.parallel.layout
    found: list[list[Weight]]
    if part == "embedding":
        found = [[*embedding_weights(model).values()]]
    elif part == "head":  # a tied matrix is a group of its own, as the first stage has it too
        own = [*head_weights(model).values()]
        found = [own, [head(model)]] if model.tie_embeddings else [own]
    else:
        apart, own = Layer(model.width, part).exchanged(layout.ep)
        experts = [Weights("", tuple(apart), layout.tp, layout.ep, apart=True)] if apart else []
        return [*experts, Weights("", tuple(own), layout.tp)]
    return [Weights("", tuple(weights), layout.tp) for weights in found]


def _busy(transfers: Transfers, config: Config, net: Net) -> Links:
    by_axis, found = groups(config), [net.nothing]
    for (transfer, _), count in transfers.items():
        if (kind := kind_of(transfer.kind)) is not None:
            found.append(times(net.links(kind, transfer.bytes, by_axis[transfer.axis]), count))
    return total(found)
