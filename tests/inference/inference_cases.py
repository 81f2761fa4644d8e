"""What the ranks of the tests of inference run."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.checkpoint.store.host_group import HostGroup
from megalite.config.layout import Layout
from megalite.config.model_schema import Attention, Model
from megalite.data.tokenizer import Tokenizer
from megalite.distributed.mesh import Mesh
from megalite.inference.crew import Crew, Writing
from megalite.inference.draft import DraftedSteps
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.flat import Stem
from megalite.inference.generate import Request, Steps, Timing, generate
from megalite.inference.logprobs import Completion, logprobs
from megalite.model.init import initialize
from megalite.parallel.parameter import cut, parameters

# Strong weights, so that what follows depends on what came before.
MODEL = Model(
    layers=4,
    width=32,
    heads=8,
    kv_heads=4,
    ffn=48,
    vocab_size=64,
    sequence_length=40,
    init_std=0.3,
    qk_norm=True,
    qkv_bias=True,
    attention=Attention(window=7, full_every=2, window_rope_theta=50.0),
)
Texts = dict[tuple[int, int], list[int]]  # by prompt and sample


class Letters(Tokenizer):
    """Every character is a token, but for 0, which ends documents."""

    vocab_size = 64
    _eod = 0

    def is_special(self, token: int) -> bool:
        return token == 0

    def _piece(self, token: int) -> str:
        return chr(token)

    def _encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self._encode(text), [(place, place + 1) for place in range(len(text))]

    def _decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def prompts(model: Model = MODEL, lengths: tuple[int, ...] = (3, 11, 1, 17, 6)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def requests(most: int, samples: int = 1, model: Model = MODEL) -> list[Request]:
    return [
        Request(index, sample, prompt, most) for index, prompt in enumerate(prompts(model)) for sample in range(samples)
    ]


def texts(
    engine: Engine,
    asked: list[Request],
    draw: Draw,
    batch: int,
    end: int | None = None,
    steps: type[Steps] = Steps,
    timing: Timing | None = None,
) -> Texts:
    """All tokens drawn, by request."""
    found: Texts = {}
    for drawn in generate(engine, asked, draw, batch, 2 * engine.model.vocab_size, end, timing, steps=steps):
        found.setdefault((drawn.request.index, drawn.request.sample), []).append(drawn.token)
    return found


def engine_of(mesh: Mesh, model: Model = MODEL, dtype: torch.dtype = torch.float64) -> Engine:
    """With padding that would be the likeliest token, as what is in memory that nothing is loaded into may be."""
    engine = Engine(model, mesh, dtype)
    initialize(engine.decoder, model, 0)
    for _, value, _, shape in parameters(engine.decoder):
        value.to_local()[len(cut(value, shape).to_local()) :] = 1e3
    return engine


def in_layouts(layouts: list[Layout], model: Model) -> list[tuple[Texts, Texts] | None]:
    """Greedy and random texts in every layout; None for those that do not need this rank."""
    found: list[tuple[Texts, Texts] | None] = []
    for layout in layouts:
        mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
        if mesh is None:
            found.append(None)
            continue
        engine = engine_of(mesh, model)
        random = texts(engine, requests(9, 2, model), Draw(1.0, 20, 0.9, seed=3), batch=3)
        found.append((texts(engine, requests(12, 1, model), Draw(0), batch=4), random))
    return found


def drafted(layouts: list[Layout], model: Model) -> list[bool | None]:
    """Whether texts are the same with drafts, greedy and random ones; None where this rank is not needed.

    With so few tokens in the vocabulary, a draft is right now and then. One text goes on to the model's last position.
    """
    found: list[bool | None] = []
    for layout in layouts:
        mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
        if mesh is None:
            found.append(None)
            continue
        engine, right = engine_of(mesh, model), []
        longest = Request(9, 0, [1] * 30, model.sequence_length - 29)
        for draw, asked, end in (
            (Draw(0), [*requests(6, 1, model)[:3], longest], None),
            (Draw(1.0, 3, 0.9, 3), requests(5, 2, model)[2:8], 5),
        ):
            timing = Timing()
            with_drafts = texts(engine, asked, draw, 3, end, DraftedSteps, timing)
            right.append(with_drafts == texts(engine, asked, draw, 3, end) and timing.tokens > timing.passes)
        found.append(all(right))
    return found


def refused(layout: Layout) -> str | None:
    """How weights that are too large are answered on this rank."""
    mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
    if mesh is None:
        return None
    engine = engine_of(mesh, dtype=torch.float32)
    with torch.no_grad():
        for param in engine.decoder.parameters():
            param.to_local().fill_(1e30)
    try:
        texts(engine, requests(2), Draw(0), batch=4)
    except ValueError as error:
        return str(error)
    return ""


def stems(vocabulary: int) -> list[Stem]:
    """Texts that begin alike: some longer than a window, some of one token; the first branch of the last is likely."""
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    sizes = [(12, (3, 1, 9, 2)), (1, (4, 5)), (3, (20, 1)), (25, (1, 1, 1, 1)), (9, (8,)), (1, (1,)), (30, (6, 10))]
    return [Stem(text(stem), [text(branch) for branch in branches]) for stem, branches in sizes]


Answers = tuple[list[tuple[float, bool]], list[list[int]]]


def answers_in_layouts(layouts: list[Layout], model: Model) -> list[Answers | None]:
    """The scores of all branches in every layout, greedy ones too, and texts, on the rank that leads."""
    group = HostGroup()
    found: list[Answers | None] = []
    asked = stems(model.vocab_size)
    for layout in layouts:
        mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
        assert mesh is not None
        crew = Crew(engine_of(mesh, model), group, Letters(Path("letters")), None)
        if not group.leads:
            crew.serve()
            found.append(None)
            continue
        written = crew.write(Writing(requests(9, 2, model), Draw(1.0, 20, 0.9), (":",)))
        likely = [
            Stem(prompt, [text])
            for prompt, text in zip(
                prompts(model), crew.write(Writing(requests(3, 1, model), Draw(0), ())), strict=True
            )
        ]
        scores = [*crew.score([*asked, *likely]), *crew.score(asked[:3])]
        found.append(([(*score,) for of_stem in scores for score in of_stem], written))
        crew.release()
    return found


def completions(vocabulary: int) -> list[Completion]:
    """Completions after prompts of several lengths, and some without any."""
    found = [
        Completion("", tuple(stem.tokens), tuple(branch)) for stem in stems(vocabulary) for branch in stem.branches
    ]
    return [*found, Completion("", (), (3, 1, 2)), Completion("", (), (5,) * 30)]


def logprobs_in_layouts(layouts: list[Layout], model: Model) -> list[list[list[float | None]] | None]:
    """The log-probabilities of all completions in every layout, on the rank that leads."""
    group = HostGroup()
    found = []
    for layout in layouts:
        mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
        assert mesh is not None
        found.append(logprobs(engine_of(mesh, model), group, completions(model.vocab_size)))
    return found
