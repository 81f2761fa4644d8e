"""What the ranks of the tests of inference run."""

from dataclasses import replace

import torch

from megalite.config.layout import Layout
from megalite.config.schema import Attention, Model
from megalite.dist.mesh import Mesh
from megalite.inference.draw import Draw
from megalite.inference.engine import Engine
from megalite.inference.generate import Request, generate
from megalite.model.init import initialize

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
    attention=Attention(window=7, full_every=2),
)
Texts = dict[tuple[int, int], list[int]]  # by prompt and sample


def prompts(model: Model = MODEL, lengths: tuple[int, ...] = (3, 11, 1, 17, 6)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def requests(most: int, samples: int = 1) -> list[Request]:
    return [Request(index, sample, prompt, most) for index, prompt in enumerate(prompts()) for sample in range(samples)]


def texts(engine: Engine, asked: list[Request], draw: Draw, batch: int, end: int | None = None) -> Texts:
    """All tokens drawn, by request."""
    found: Texts = {}
    for drawn in generate(engine, asked, draw, batch, engine.model.vocab_size, end):
        found.setdefault((drawn.request.index, drawn.request.sample), []).append(drawn.token)
    return found


def engine_of(mesh: Mesh, model: Model = MODEL, dtype: torch.dtype = torch.float64) -> Engine:
    engine = Engine(model, mesh, dtype)
    initialize(engine.decoder, model, 0)
    return engine


def in_layouts(layouts: list[Layout], tied: bool) -> list[tuple[Texts, Texts] | None]:
    """Greedy and random texts in every layout; None for those that do not need this rank."""
    model = replace(MODEL, tie_embeddings=tied)
    found: list[tuple[Texts, Texts] | None] = []
    for layout in layouts:
        mesh = Mesh.build(layout, torch.device("cpu"), sharded=False)
        if mesh is None:
            found.append(None)
            continue
        engine = engine_of(mesh, model)
        random = texts(engine, requests(9, samples=2), Draw(1.0, 20, 0.9, seed=3), batch=3)
        found.append((texts(engine, requests(12), Draw(0), batch=4), random))
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
