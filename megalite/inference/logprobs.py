"""Log-probabilities of given tokens: of completions in JSON Lines, each after its prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.base.errors import InputError
from megalite.base.json_bounds import parse
from megalite.checkpoint.store.host_group import HostGroup
from megalite.data.tokenizer import Tokenizer
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.inference.prompts import file_lines
from megalite.inference.score import token_scores

RULE = 'is not {"prompt": …, "completion": …}, each a text or a list of token ids; the prompt may be left out'


@dataclass(frozen=True)
class Completion:
    """Tokens to be scored, and those before them."""

    where: str  # place in the file, for messages
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def stem(self) -> Stem:
        """The tokens as the engine scores them. Without a prompt, the first one has nothing to be predicted from."""
        if self.prompt:
            return Stem(self.prompt, [self.tokens])
        return Stem(self.tokens[:1], [self.tokens[1:]])


def logprobs(engine: Engine, group: HostGroup, given: Sequence[Completion]) -> list[list[float | None]] | None:
    """The log-probability of every token of each completion, in nats, on the rank that leads; None on others.

    None stands for the first token of a completion without a prompt. Collective. Raises InputError if one is not
    finite.
    """
    mesh = engine.mesh
    mine = range(len(given))[mesh.dp_rank :: mesh.layout.dp]
    with engine.together():
        scores = token_scores(engine, [given[number].stem for number in mine])
    speaks = mesh.coordinates["pp"] == mesh.coordinates["tp"] == 0
    found = [(number, branch[:, 0].tolist()) for number, (branch,) in zip(mine, scores, strict=True)]
    told = group.gather(found if speaks else [])
    if told is None:
        return None
    by_number = {number: values for part in told for number, values in part}
    return [
        by_number[number] if completion.prompt else [None, *by_number[number]]
        for number, completion in enumerate(given)
    ]


def as_line(completion: Completion, values: Sequence[float | None]) -> dict[str, Any]:
    """The object of a completion in the file of results."""
    total = sum(value for value in values if value is not None)
    return {"tokens": list(completion.tokens), "logprobs": list(values), "sum": total}


def read_completions(
    file: str, tokenizer: Tokenizer | None, begin: Sequence[int], vocabulary: int, length: int, wanted: str
) -> list[Completion]:
    """The completions of JSON Lines, for a model of so many tokens and sequences of `length`. Raises InputError.

    begin: tokens put before every text. wanted: the message where a text needs a tokenizer and there is none.
    """
    where = f"--logprobs {file}"
    lines = file_lines(file, where, "a file")
    if not lines:
        raise InputError(f"{where}: has no line")
    return [_checked(_completion(line, place, tokenizer, begin, wanted), vocabulary, length) for place, line in lines]


def _completion(line: bytes, place: str, tokenizer: Tokenizer | None, begin: Sequence[int], wanted: str) -> Completion:
    try:
        found = parse(line)
    except ValueError:
        raise InputError(f"{place}: {RULE}, but no JSON") from None
    if not isinstance(found, dict) or not {"completion"} <= found.keys() <= {"prompt", "completion"}:
        raise InputError(f"{place}: {RULE}")
    parts = [found["completion"], *([] if found.get("prompt") is None else [found["prompt"]])]
    if all(_is_tokens(part) for part in parts):
        return Completion(place, tuple(found.get("prompt") or ()), tuple(found["completion"]))
    if not all(_is_text(part) for part in parts):
        raise InputError(f"{place}: {RULE}; both must be of one kind")
    if tokenizer is None:
        raise InputError(f"{place}: is a text; {wanted}")
    return _encoded(found, place, tokenizer, begin)


def _encoded(texts: Mapping[str, str | None], place: str, tokenizer: Tokenizer, begin: Sequence[int]) -> Completion:
    """A completion of texts: the tokens of both texts together, from where those of the prompt alone end."""
    prompt, completion = texts.get("prompt") or "", texts["completion"]
    whole = [*begin, *tokenizer.encode(f"{prompt}{completion}")]
    count = len([*begin, *tokenizer.encode(prompt)]) if prompt else len(begin)
    return Completion(place, tuple(whole[:count]), tuple(whole[count:]))


def _checked(completion: Completion, vocabulary: int, length: int) -> Completion:
    """The same completion. Raises InputError if the model cannot score it."""
    where, whole = completion.where, (*completion.prompt, *completion.tokens)
    if not completion.tokens or len(whole) < 2:
        raise InputError(f"{where}: has no token that follows another one; give a prompt or a longer completion")
    if max(whole) >= vocabulary:
        raise InputError(f"{where}: token {max(whole)} is outside model.vocab_size = {vocabulary:,}")
    if len(whole) > length + 1:
        rule = f"has {len(whole):,} tokens, more than the {length + 1:,} that model.sequence_length = {length:,} scores"
        raise InputError(f"{where}: {rule}; leave out the beginning of the prompt")
    return completion


def _is_tokens(part: object) -> bool:
    return isinstance(part, list) and all(type(token) is int and token >= 0 for token in part)


def _is_text(part: object) -> bool:
    return isinstance(part, str) and not any("\ud800" <= character <= "\udfff" for character in part)
