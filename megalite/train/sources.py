"""What a run reads, opened and described. Imports no torch."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megalite.checkpoint.manifest import Source as SourceRead
from megalite.config.convert import to_plain
from megalite.config.schema import Config, Source
from megalite.data.samples import Samples

OF_A_NODE = re.compile(r"data\.((train|valid)\[\d+\]\.path|tokenizer)")  # where it may keep its own copy


def open_samples(config: Config, sources: Sequence[Source]) -> Samples:
    """The samples of these sources. Raises InputError where a store is missing, damaged or too small."""
    model, end = config.model, config.data.end_of_document
    return Samples(sources, config.run.seed, model.sequence_length, model.vocab_size, end)


def as_remembered(sources: Sequence[Source], samples: Samples) -> tuple[SourceRead, ...]:
    """The sources of `samples` as a checkpoint remembers them."""
    read = zip(sources, samples.parts, samples.fingerprints(), strict=True)
    return tuple(SourceRead(source.path, source.weight, part.tokens, mark) for source, part, mark in read)


def same_everywhere(config: Config) -> dict[str, Any]:
    """What all ranks must have in common: every key, but for the places where each node may have a copy of its own."""
    return {key: value for key, value in _leaves("", to_plain(config)) if not OF_A_NODE.fullmatch(key)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value under its dotted key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(f"{key}[{index}]", inner)
    else:
        yield key, value
