"""Nodes of a job: the ranks of each, and the node that keeps a copy of its parts. Imports no torch."""

from collections.abc import Iterator, Sequence


class Nodes:
    """The nodes of a job, in the order of their first ranks.

    names: of the node of every rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        number = {name: node for node, name in enumerate(self.names)}
        self.node_of = [number[name] for name in names]  # by rank
        self.ranks: list[list[int]] = [[] for _ in self.names]  # by node, ascending
        for rank, node in enumerate(self.node_of):
            self.ranks[node].append(rank)

    def __len__(self) -> int:
        return len(self.names)

    def leads(self, rank: int) -> bool:
        """Return whether `rank` acts for its node."""
        return self.leader(self.node_of[rank]) == rank

    def leader(self, node: int) -> int:
        """The rank that acts for a node."""
        return self.ranks[node][0]

    def before(self, node: int) -> int:
        """The node whose parts `node` keeps a copy of: the nodes stand in a ring."""
        return (node - 1) % len(self)

    def rounds(self) -> Iterator[dict[int, int]]:
        """Yield rounds of transfers, receiver by sender, that bring every node's parts to the next node.

        In a round every rank sends at most once and receives at most once. Where all nodes have as many ranks, one
        round is enough.
        """
        targets = [self.ranks[(node + 1) % len(self)] for node in range(len(self))]
        count = max(-(-len(self.ranks[node]) // len(targets[node])) for node in range(len(self)))
        for turn in range(count):
            yield {
                sender: targets[node][place - turn * len(targets[node])]
                for node in range(len(self))
                for place, sender in enumerate(self.ranks[node])
                if place // len(targets[node]) == turn
            }
