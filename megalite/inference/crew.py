"""All ranks at the service of the one that leads: requests are divided among replicas of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megalite.checkpoint.store.host_group import HostGroup
from megalite.data.tokenizer import Tokenizer
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.inference.generate import Request, generate
from megalite.inference.score import Score, score

BATCH = 16  # texts written at a time
TAIL_TOKENS = 8  # tokens decoded to find the end of a text, beside one for each of its characters


@dataclass(frozen=True)
class Writing:
    """Texts to write."""

    requests: Sequence[Request]
    draw: Draw
    until: Sequence[str]  # a text ends with the first of these


class Crew:
    """The ranks. One leads and calls `score` and `write`; the others `serve` meanwhile, until it calls `release`.

    end: the token that ends documents. ends: further ones that end a text. begin: the tokens that begin every text.
    """

    def __init__(
        self,
        engine: Engine,
        group: HostGroup,
        tokenizer: Tokenizer,
        end: int | None,
        ends: frozenset[int] = frozenset(),
        begin: tuple[int, ...] = (),
    ) -> None:
        self.engine, self.group, self.tokenizer = engine, group, tokenizer
        self.end, self.begin = end, begin
        self.ends = ends if end is None else ends | {end}

    def score(self, stems: Sequence[Stem]) -> list[list[Score]]:
        """The scores of all branches of every stem."""
        order = sorted(range(len(stems)), key=lambda number: -stems[number].length)
        found: list[list[Score]] = self._all([stems[number] for number in order])
        by_number = dict(zip(order, found, strict=True))
        return [by_number[number] for number in range(len(stems))]

    def write(self, writing: Writing) -> list[list[int]]:
        """The tokens of every text, without the one that ends it."""
        return self._all(writing)

    def serve(self) -> None:
        """Work for the rank that leads until it has no more to do."""
        while (work := self.group.tell(None)) is not None:
            self.group.gather(self._share(work))

    def release(self) -> None:
        """Let the others go."""
        self.group.tell(None)

    def _all(self, work: Sequence[Stem] | Writing) -> list[Any]:
        self.group.tell(work)
        told = self.group.gather(self._share(work))
        assert told is not None, "this rank leads"
        by_replica = {replica: found for replica, found in told if found is not None}
        count = sum(map(len, by_replica.values()))
        return [by_replica[number % len(by_replica)][number // len(by_replica)] for number in range(count)]

    def _share(self, work: Sequence[Stem] | Writing) -> tuple[int, list[Any] | None]:
        """Compute this replica's part of the results; None on all ranks of it but one."""
        mesh = self.engine.mesh
        mine = slice(mesh.dp_rank, None, mesh.layout.dp)
        found: list[Any]
        if isinstance(work, Writing):
            found = self._written(work, work.requests[mine])
        else:
            with self.engine.together():
                found = score(self.engine, work[mine])
        at = mesh.coordinates
        return mesh.dp_rank, found if at["pp"] == at["tp"] == 0 else None

    def _written(self, work: Writing, requests: Sequence[Request]) -> list[list[int]]:
        size = self.tokenizer.vocab_size
        tail = TAIL_TOKENS + max(map(len, work.until), default=0)

        def over(tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens[-tail:])
            return tokens[-1] in self.ends or any(ending in text for ending in work.until)

        found: dict[tuple[int, int], list[int]] = {(request.index, request.sample): [] for request in requests}
        for drawn in generate(self.engine, requests, work.draw, BATCH, size, self.end, over=over):
            if drawn.token not in self.ends:
                found[drawn.request.index, drawn.request.sample].append(drawn.token)
        return list(found.values())
