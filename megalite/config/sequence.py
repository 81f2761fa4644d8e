"""Rules about sequences: the parts that ranks hold of them, and the documents inside."""

from collections.abc import Iterator

from megalite.config.errors import Problem, listing
from megalite.config.numbers import divisible, divisors, multiples
from megalite.config.schema import Data, Model, Parallel


def sequence_rules(model: Model, parallel: Parallel) -> Iterator[Problem]:
    """Every broken rule of sequences that are split over context- and tensor-parallel ranks."""
    cp, tp, parts, length = parallel.cp, parallel.tp, parallel.sequence_parts, model.sequence_length
    if cp <= 1 or tp < 1:  # between tensor-parallel regions too, activations are split along the sequence
        yield from divisible("model.sequence_length", length, "parallel.tp", tp)
        return
    method = f"parallel.context.method = {parallel.context.method}"
    if length >= 1 and length % parts:
        product = "parallel.cp · parallel.tp" if parts == cp * tp else "2 · parallel.cp · parallel.tp"
        rule = f"must be divisible by {product} = {parts} with {method}"
        yield Problem("model.sequence_length", rule, f"use {listing(multiples(length, parts))}", length)
    heads = model.heads
    if parallel.context.method == "ulysses" and heads >= 1 and heads % (cp * tp):
        rule = f"must be divisible by parallel.cp · parallel.tp = {cp * tp} with {method}, which shares out heads"
        fitting = [number // tp for number in divisors(heads, cp * tp, tp)]
        fix = f"cp {listing(fitting)}, or " if fitting else ""
        yield Problem("model.heads", rule, f"use {fix}method ring or all_gather", heads)


def document_rules(data: Data, vocab_size: int) -> Iterator[Problem]:
    """Every broken rule of attention and positions that end with a document."""
    end = data.end_of_document
    if data.reset_positions and not data.mask_documents:
        rule = "needs data.mask_documents = true, or tokens of different documents would share a position"
        yield Problem("data.reset_positions", rule, "set data.mask_documents=true", True)
    if data.mask_documents and end is None and data.tokenizer is None:
        rule = "needs to know which token ends a document"
        yield Problem("data.mask_documents", rule, "set data.end_of_document or data.tokenizer", True)
    if end is not None and not 0 <= end < vocab_size:
        rule = f"must be a token id, from 0 to model.vocab_size − 1 = {vocab_size - 1}"
        yield Problem("data.end_of_document", rule, value=end)
