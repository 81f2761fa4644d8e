"""A model with adapters computes what the same model computes with W + scale · B A in place of each adapted W.

With dora, rows of that have their trained norms. Where the base is in four bits, W is what these are again.
"""

from dataclasses import replace

import pytest
import torch
from toy_jobs import MODEL, one_rank

from megalite.config.layers import adapter_of
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Attention, Base, Experts, Latent, Model
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.parallel.parameter import parameters
from megalite.parallel.product import Plain
from megalite.parallel.tensor import use_product
from megalite.plan.parts.adapted import factor_names, magnitude_name
from megalite_kernels.nf4 import dequantize_nf4, quantize_nf4

TOKENS = torch.randint(32, (8, 2), generator=torch.Generator().manual_seed(1))
LATENT = {"kv_heads": 4, "head_width": 6, "rotary_width": 2, "qkv_bias": False}
MODELS: dict[str, tuple[Model, Adapter]] = {
    "grouped queries": (MODEL, Adapter(rank=4, alpha=6.0)),
    "ends": (MODEL, Adapter(rank=4, alpha=6.0, targets=["embedding", "head"])),
    "rslora, some": (MODEL, Adapter(rank=4, alpha=6.0, rslora=True, targets=["value", "up"])),
    "factors of branches": (
        replace(MODEL, parametrization="completep", base=Base(width=8, layers=1, head_width=4)),
        Adapter(rank=4, alpha=6.0),
    ),
    "norms after": (replace(MODEL, norm="post", tie_embeddings=True), Adapter(rank=4, alpha=6.0)),
    "dora, biases": (replace(MODEL, out_bias=True), Adapter(rank=4, alpha=6.0, dora=True)),
    "dora, factors of branches": (
        replace(MODEL, parametrization="completep", base=Base(width=8, layers=1, head_width=4)),
        Adapter(rank=4, alpha=6.0, targets=["query", "attention_output", "down"], dora=True),
    ),
    "experts": (
        replace(MODEL, experts=Experts(4, 2, width=8, shared_width=12, biases=True, gate="clamped")),
        Adapter(rank=3, alpha=9.0),
    ),
    "four bits": (
        replace(MODEL, width=64, head_width=16, ffn=128, experts=Experts(4, 2, width=64, shared_width=128)),
        Adapter(rank=3, alpha=9.0, base="nf4"),
    ),
    "four bits, latent": (
        replace(
            MODEL,
            **{**LATENT, "width": 64, "head_width": 16, "ffn": 128},
            attention=Attention(latent=Latent(query_rank=64, key_rank=128, value_width=16)),
        ),
        Adapter(rank=3, alpha=9.0, targets=["query", "latent", "down"], base="nf4"),
    ),
    "dora, four bits, latent": (
        replace(
            MODEL,
            **{**LATENT, "width": 64, "head_width": 16, "ffn": 128},
            attention=Attention(latent=Latent(query_rank=64, key_rank=128, value_width=16)),
        ),
        Adapter(rank=3, alpha=9.0, base="nf4", dora=True),
    ),
    "latent": (
        replace(MODEL, attention=Attention(latent=Latent(query_rank=10, key_rank=6, value_width=4)), **LATENT),
        Adapter(rank=3, alpha=9.0),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_merged_weights_do(name: str) -> None:
    model, adapter = MODELS[name]
    scale = adapter_of(adapter).scale
    with one_rank(), torch.no_grad():
        mesh = Mesh.build(Layout(), torch.device("cpu"))
        assert mesh is not None
        adapted, plain = (
            Decoder(each, mesh.tp, range(model.layers)).double().to_empty(device="cpu")
            for each in (Config(model=model, adapter=adapter).model, model)
        )
        use_product(adapted.layers, Plain(torch.float64))
        initialize(adapted, adapted.model, seed=0)
        initialize(plain, model, seed=0)
        kept = {each.name: each for each in parameters(adapted)}
        wide = {key for key, each in kept.items() if not each.four_bits and "lora_" not in key}
        if adapter.base == "nf4":
            assert {key for key in wide if "layers." in key and kept[key].value.ndim > 1} <= {
                f"layers.{layer}.mlp.router.weight" for layer in range(model.layers)
            }
            assert {"embed.weight", "head.output.weight"} <= wide
        for each in parameters(plain):
            assert kept[each.name].four_bits is (adapter.base == "nf4" and each.role.fits_four_bits)
            if kept[each.name].four_bits:
                local = each.value.to_local()
                exact = local.clone()
                local.copy_(dequantize_nf4(quantize_nf4(local), torch.float64))
                assert not local.equal(exact)
        factors = {key: each.to_local() for key, each in adapted.named_parameters() if "lora_" in key}
        draw = torch.Generator().manual_seed(2)
        for key, param in plain.named_parameters():
            if key.endswith(".bias"):
                kept[key].value.to_local().copy_(param.to_local().normal_(0, 0.5, generator=draw))
        before = plain(TOKENS)
        torch.testing.assert_close(adapted(TOKENS), before, rtol=1e-13, atol=1e-13)  # the second factors begin at 0
        for each in factors.values():
            each.normal_(0, 0.5, generator=draw)
        for key, param in plain.named_parameters():
            first, second = factor_names(key)
            if first in factors:
                weight = param.to_local()
                norm = weight.norm(dim=-1)
                weight.add_(scale * factors.pop(second) @ factors.pop(first))
                if adapter.dora:
                    weight.mul_(((norm + factors.pop(magnitude_name(key))) / weight.norm(dim=-1))[:, None])
        assert not factors
        after = plain(TOKENS)
        assert (after - before).abs().max() > 1e-3
        torch.testing.assert_close(adapted(TOKENS), after, rtol=1e-11, atol=1e-12)
