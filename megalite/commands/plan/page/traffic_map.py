"""The communication of a layout on nodes and GPUs: who talks to whom, over what."""

from collections import Counter
from collections.abc import Sequence

from megalite.base.errors import counted
from megalite.cost.cluster import Cluster
from megalite.cost.flows import Flow
from megalite.cost.predict import Prediction
from megalite.plan.parts.transfers import axis_sizes
from megalite_launch.base.texts import scaled, seconds_text
from megalite_launch.page.html import Key, escape, figure, table

AXES = {  # names and colours of flows, by axis
    "tp": ("tp", 0),
    "cp": ("cp", 1),
    "fsdp": ("shards", 2),
    "dp_replicate": ("replicas", 3),
    "pp": ("pp", 4),
    "ep": ("ep", 5),
    "ep_fsdp": ("shards of experts", 6),
    "ep_replicate": ("replicas of experts", 7),
    "stage": ("Muon", 9),
}
HIDDEN_SHARE = 1e-6  # share of the seconds that a flow takes alone: less counts as nothing
MAX_NODES = 4  # nodes that are drawn
GPUS_PER_ROW = 8  # GPUs beside each other
GPU_SIDE, GPU_STEP, NODE_PADDING, NODE_HEAD = 18, 23, 8, 34  # pixels: a GPU, to the next, inside a node, above its GPUs


def communication(flows: Sequence[Flow], prediction: Prediction) -> str:
    """A table of the groups, and a picture of each."""
    cluster = prediction.cluster
    header = ["group", "ranks", "spans", "link", "sent by a GPU", "alone", "in the step", "moves"]
    rows: list[list[str | Key]] = [
        [
            Key(AXES[flow.axis][0], f"c{AXES[flow.axis][1]}"),
            f"{flow.group.size:,}",
            spans(flow, cluster),
            scaled(flow.bandwidth, "B/s"),
            scaled(flow.sent, "B"),
            seconds_text(flow.seconds),
            _counted(flow, prediction),
            flow.what,
        ]
        for flow in flows
    ]
    pictures = [
        figure(
            *_picture(flow, cluster, prediction.gpus),
            f"{AXES[flow.axis][0]}: {counted(flow.group.size, 'rank')} {spans(flow, cluster)}",
        )
        for flow in flows
    ]
    return "\n".join([table(header, rows, (0, 2, 6, 7)), f'<div class="maps">{"".join(pictures)}</div>'])


def spans(flow: Flow, cluster: Cluster) -> str:
    """Describe what a group spans: `inside a node`, or `over 4 nodes, 8 GPUs in each`."""
    nodes = _nodes(flow, cluster)
    if len(nodes) == 1:
        near = next((level.gpus for level in cluster.levels if flow.ranks[-1] < level.gpus), cluster.gpus_per_node)
        return "inside a node" if near == cluster.gpus_per_node else f"inside an island of {near} GPUs"
    members = Counter(rank // cluster.gpus_per_node for rank in flow.ranks)
    each = max(members.values())
    about = "" if each == min(members.values()) else "at most "
    return f"over {len(nodes):,} nodes, {about}{each} GPU{'s' * (each > 1)} in each"


def _counted(flow: Flow, prediction: Prediction) -> str:
    """Describe what the prediction counts for a flow: seconds of its own, or the part in which it is."""
    if flow.part in ("bubble", "optimizer"):
        return "in the waiting for stages" if flow.part == "bubble" else "in the optimizer"
    both = flow.part == "data" and 1 not in _data_ranks(prediction)
    if both and flow.axis == "dp_replicate":
        return "with the shards"
    seconds = prediction.parts[flow.part]
    return seconds_text(seconds) if seconds > HIDDEN_SHARE * flow.seconds else "0 s: hidden"


def _data_ranks(prediction: Prediction) -> tuple[int, int]:
    sizes = axis_sizes(prediction.config)
    return sizes["fsdp"], sizes["dp_replicate"]


def _nodes(flow: Flow, cluster: Cluster) -> list[int]:
    return list(dict.fromkeys(rank // cluster.gpus_per_node for rank in flow.ranks))


def _picture(flow: Flow, cluster: Cluster, gpus: int) -> tuple[str, int]:
    """The first nodes of the group of GPU 0, with its members coloured and joined; and the width of the picture."""
    each = cluster.gpus_per_node
    nodes = _nodes(flow, cluster)
    drawn = nodes if len(nodes) <= MAX_NODES else [*nodes[: MAX_NODES - 1], nodes[-1]]
    rows = -(-each // GPUS_PER_ROW)
    wide, tall = 2 * NODE_PADDING + GPU_STEP * min(each, GPUS_PER_ROW), NODE_HEAD + GPU_STEP * rows + NODE_PADDING
    beside = max(1, min(len(drawn), 440 // (wide + 14)))
    width, height = beside * (wide + 14), -(-len(drawn) // beside) * (tall + 14)
    colour = AXES[flow.axis][1]
    places: dict[int, tuple[float, float]] = {}
    boxes, squares = [], []
    for at, node in enumerate(drawn):
        left, top = at % beside * (wide + 14) + 1, at // beside * (tall + 14) + 1
        boxes.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{tall}" rx="6" class="node"/>')
        more = f" (of {len(nodes):,})" if at == len(drawn) - 1 and len(nodes) > len(drawn) else ""
        boxes.append(f'<text x="{left + NODE_PADDING}" y="{top + 15}" class="small">node {node:,}{more}</text>')
        for rank in range(node * each, min((node + 1) * each, gpus)):
            row, column = divmod(rank - node * each, GPUS_PER_ROW)
            x, y = left + NODE_PADDING + column * GPU_STEP, top + NODE_HEAD + row * GPU_STEP
            member = rank in flow.ranks
            if member:
                places[rank] = x + GPU_SIDE / 2, y
            of = f"c{colour}" if member else "outline"
            squares.append(
                f'<rect x="{x}" y="{y}" width="{GPU_SIDE}" height="{GPU_SIDE}" rx="3" class="{of}">'
                f"<title>GPU {rank:,}{', in the group of GPU 0' * member}</title></rect>"
            )
    links = [
        _link(places[a], places[b], f"s{colour}", a // each != b // each)
        for a, b in zip(list(places)[:-1], list(places)[1:], strict=True)
    ]
    name = escape(f"GPUs that talk to GPU 0 in {AXES[flow.axis][0]}")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{name}"><title>{name}</title>'
    )
    return "\n".join([opening, *boxes, *links, *squares, "</svg>"]), width


def _link(start: tuple[float, float], end: tuple[float, float], colour: str, across: bool) -> str:
    """An arc from one GPU to the next; a broken one goes from node to node."""
    (x, y), (a, b) = start, end
    high = min(y, b) - (16 if across else 9)
    return (
        f'<path d="M {x:.1f} {y:.1f} Q {(x + a) / 2:.1f} {high:.1f} {a:.1f} {b:.1f}" '
        f'class="curve {colour}{" across" * across}"/>'
    )
