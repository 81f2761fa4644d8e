"""The model as plain modules of PyTorch, on one device: the least work of the host that others are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.model_schema import Model


class _Layer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        width, queries, keys = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
        self.head_size = model.head_size
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (queries, keys, keys))
        self.o = nn.Linear(queries, width, bias=False)
        self.gate, self.up = (nn.Linear(width, model.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(model.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normal = self.attention_norm(x)
        q, k, v = (
            linear(normal).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normal = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Plain(nn.Module):
    """A Llama model with as many key-value heads as query heads: tokens and targets `[b, s]` → mean loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocab_size, model.width)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        self.norm, self.head = nn.RMSNorm(model.width), nn.Linear(model.width, model.vocab_size, bias=False)
        turns = torch.arange(model.sequence_length)[:, None] * model.rope_theta ** torch.linspace(
            0, -1, model.head_size // 2 + 1
        )[:-1].repeat(2)
        self.cos, self.sin = turns.cos(), turns.sin()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def plain_step(model: Plain, optimizer: torch.optim.Optimizer, batch: Tensor, clip_norm: float) -> float:
    """Take a step on `batch` `[b, s + 1]`. Returns the loss."""
    loss: Tensor = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
