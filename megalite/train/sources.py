"""Opens the data that a run reads, and describes it. Imports no torch."""

from collections.abc import Sequence

from megalite.checkpoint.store.manifest import Source as SourceRead
from megalite.config.schema import Config, Source
from megalite.data.samples import Samples


def open_samples(config: Config, sources: Sequence[Source]) -> Samples:
    """The samples of these sources. Raises InputError if a store is missing, damaged or too small."""
    model, data = config.model, config.data
    return Samples(sources, config.run.seed, model.sequence_length, model.vocab_size, data.end_of_document, data.remote)


def as_remembered(sources: Sequence[Source], samples: Samples) -> tuple[SourceRead, ...]:
    """The sources of `samples` in the form that a checkpoint keeps."""
    read = zip(sources, samples.parts, samples.fingerprints(), strict=True)
    return tuple(SourceRead(source.path, source.weight, part.tokens, mark) for source, part, mark in read)
