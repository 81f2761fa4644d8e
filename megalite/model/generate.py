"""Sampling from a decoder held by one process."""

from collections.abc import Iterator, Sequence

import torch

from megalite.model.decoder import Decoder


@torch.inference_mode()
def sample(
    decoder: Decoder, prompt: Sequence[int], count: int, vocabulary: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """The `count` tokens that follow `prompt`, one by one.

    vocabulary: only ids below it are drawn; a model's own may be padded. temperature: 0 takes the likeliest
    token. top_k: draw among this many, 0 for all. The model sees the latest `sequence_length` tokens and runs
    over all of them for every new one; there is no cache.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        context = torch.tensor(tokens[-decoder.model.sequence_length :])[:, None]  # s b
        logits = decoder(context)[-1, 0, :vocabulary].double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            kept = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
            chances = (kept.values / temperature).softmax(0)
            token = int(kept.indices[torch.multinomial(chances, 1, generator=generator)])
        tokens.append(token)
        yield token
