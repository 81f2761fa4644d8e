"""The tasks of lm-evaluation-harness (EleutherAI), which is an optional package, on a model of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoTokenizer

from megalite.base.errors import InputError, listing
from megalite.inference.crew import Crew, Writing
from megalite.inference.draw import Draw
from megalite.inference.flat import Stem
from megalite.inference.generate import Request
from megalite.inference.score import PASS_TOKENS

LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of the same
DEFAULT_NEW_TOKENS = 256  # tokens, where a task names none of them
Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, and tokens of a context and its continuation


def evaluate(
    crew: Crew,
    tasks: Sequence[str],
    folder: str | None,
    limit: int | None,
    fewshot: int | None,
    published: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The results of the harness by task. Raises InputError for unknown tasks and data that cannot be had.

    folder: of further tasks. limit: documents of each task. fewshot: examples in every prompt; None: as tasks say.
    published: the Hugging Face folder that the tokenizer comes from; None: a run's own, which never begins a text.
    """
    manager = _manager(tasks, folder)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise InputError(f"--tasks: lm-eval has no {listing(unknown)}; --task-folder names a folder with others")
    try:
        found = simple_evaluate(
            Harnessed(crew, published),
            tasks=list(tasks),
            num_fewshot=fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
        )
    except InputError:
        raise
    except (OSError, ValueError) as error:  # no data, no network, a task that is none
        raise InputError(f"--tasks {','.join(tasks)}: lm-eval: {str(error)[:500] or type(error).__name__}") from error
    assert found is not None
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def _manager(tasks: Sequence[str], folder: str | None) -> TaskManager:
    """The tasks there are: those of the folder, if it has all, as looking through the harness's own takes seconds."""
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=folder)


class Harnessed(TemplateLM):  # type: ignore[misc, unused-ignore]
    """The interface that the harness needs of a model. Numbers equal those of its `hf` models on the same weights."""

    def __init__(self, crew: Crew, published: Path | None = None) -> None:
        super().__init__()
        self.crew = crew
        self._prefix = None if published is None else _prefix(published)
        self.max_length = crew.engine.model.sequence_length
        self.written = 0  # texts so far: each draws from random numbers of its own

    @property
    def eot_token_id(self) -> int:
        if self.crew.end is None:
            raise InputError(f"{self.crew.tokenizer.path}: has no end-of-document token, which tasks need")
        return self.crew.end

    @property
    def prefix_token_id(self) -> int:
        """The token put before a text that has nothing before it."""
        if self._prefix is not None:
            return self._prefix
        return self.crew.begin[0] if self.crew.begin else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A part of the names of the harness's caches."""
        return self.crew.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        begin, tokenizer = self.crew.begin, self.crew.tokenizer
        spelled = begin and string.startswith(tokenizer.decode(begin[:1]))
        if add_special_tokens is False or (add_special_tokens is None and spelled):
            begin = ()
        return [*begin, *tokenizer.encode(string)]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._loglikelihood_tokens([(request.args, *self._pair(*request.args)) for request in requests])

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, at least one, and of its continuation. Raises InputError for one without tokens.

        The harness moves blanks at the end of a context into the continuation, so a blank one has no tokens left. Its
        own `hf` models fail there; here it is scored like an empty one, after the token that begins texts.
        """
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            before, after = [], self.tok_encode(continuation, add_special_tokens=False)
        if not before:
            prefix = [self.prefix_token_id]
            before, after = (prefix, after[1:]) if after[:1] == prefix else (prefix, after)
        if not after:
            rule = f"the continuation {continuation[:100]!r} of the context {context[-100:]!r} has no tokens to score"
            raise InputError(f"--tasks: {rule}; the task's doc_to_choice or doc_to_target must give it a text")
        return before, after

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows that each see one token of the one before."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            tokens, length = self.tok_encode(request.args[0]), self.max_length
            pairs = list(map(make_disjoint_window, get_rolling_token_windows(tokens, self.prefix_token_id, length, 1)))
            windows += [(None, *pair) for pair in pairs]
            counts.append(len(pairs))
        each = iter(self._loglikelihood_tokens(windows))
        return [sum(next(each)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **others: Any) -> list[tuple[float, bool]]:
        """Continuations of one context are scored in one pass, which reads the context once."""
        stems: list[tuple[list[int], list[int]]] = []  # a context, and the requests that continue it
        latest: dict[tuple[int, ...], int] = {}  # by context
        lengths: list[int] = []
        for number, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if not continuation or room < 1:
                rule = (
                    f"a continuation has {len(continuation)} tokens; a model of {self.max_length} can score 1 to that"
                )
                raise InputError(f"--tasks: {rule}")
            key = tuple(context[-room:])
            at = latest.get(key)
            if at is None or lengths[at] + len(continuation) > PASS_TOKENS:
                at = latest[key] = len(stems)
                stems.append((list(key), []))
                lengths.append(len(key))
            stems[at][1].append(number)
            lengths[at] += len(continuation)
        found = self.crew.score([Stem(key, [requests[number][2] for number in numbers]) for key, numbers in stems])
        results = [(0.0, False)] * len(requests)
        for (_, numbers), scores in zip(stems, found, strict=True):
            for number, score in zip(numbers, scores, strict=True):
                results[number] = score.log_likelihood, score.greedy
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[tuple[Draw, tuple[str, ...]], list[tuple[int, Request]]] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            draw, until, most = _how(options)
            if most >= self.max_length:
                raise InputError(f"--tasks: {most} new tokens are asked of a model that reads {self.max_length}")
            tokens = self.tok_encode(context)[most - self.max_length :] or [self.prefix_token_id]
            asked = Request(self.written + number, 0, tuple(tokens), most)
            alike.setdefault((draw, until), []).append((number, asked))
        for (draw, until), group in alike.items():
            written = self.crew.write(Writing([request for _, request in group], draw, until))
            for (number, _), tokens in zip(group, written, strict=True):
                texts[number] = _cut(self.crew.tokenizer.decode(tokens), until)
        self.written += len(requests)
        return texts


def _prefix(folder: Path) -> int | None:
    """Token before a text for the harness's own `hf` models of a folder; None: transformers cannot read it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
    found: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return found


def _how(options: dict[str, Any]) -> tuple[Draw, tuple[str, ...], int]:
    """Parse options into the settings of the draw, the texts that end a continuation, and its tokens at most."""
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    most = next((int(options[name]) for name in LENGTH_OPTIONS if options.get(name) is not None), DEFAULT_NEW_TOKENS)
    random = options.get("do_sample", (options.get("temperature") or 0) > 0)
    temperature = float(1.0 if options.get("temperature") is None else options["temperature"])
    if not random or temperature == 0:
        return Draw(0), tuple(until), most
    return Draw(temperature, options.get("top_k") or 0, options.get("top_p") or 1.0), tuple(until), most


def _cut(text: str, until: Sequence[str]) -> str:
    for ending in until:
        if ending:
            text = text.partition(ending)[0]
    return text
