"""Meta's original files, checked against files that were made from the published rules with plain torch."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_files import Ours, random_weights, read, same
from torch import Tensor

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import meta
from megalite.config.model_schema import Model, RopeScaling

LLAMA = Model(layers=2, width=32, heads=4, kv_heads=4, ffn=256, vocab_size=64, sequence_length=4096, norm_eps=1e-6)
MODELS = {
    "Llama 1": LLAMA,
    "Llama 2 70B": replace(LLAMA, kv_heads=2, heads=8, ffn=1024),
    "Llama 3": replace(LLAMA, kv_heads=2, rope_theta=500_000.0, sequence_length=8192),
    "Llama 3.1": replace(LLAMA, kv_heads=2, rope_theta=500_000.0, sequence_length=131_072, rope_scaling=RopeScaling()),
    "odd feed-forward": replace(LLAMA, ffn=150),
}


def turned(weight: Tensor, heads: int) -> Tensor:
    """From halves to neighbours: the inverse of what Hugging Face's converter does."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def write(path: Path, model: Model, ours: Ours, files: int = 1, by_rows: bool = True, **more: object) -> None:
    path.mkdir(parents=True)
    params = {"dim": model.width, "n_layers": model.layers, "n_heads": model.heads, "norm_eps": model.norm_eps}
    params |= {"vocab_size": -1, "multiple_of": 256, "rope_theta": model.rope_theta, "n_kv_heads": model.kv_heads}
    if model.rope_scaling:
        params["use_scaled_rope"] = True
    (path / "params.json").write_text(json.dumps(params | more))
    for rank in range(files):
        state = {
            "tok_embeddings.weight": ours["embed.weight"].chunk(files, 0 if by_rows else 1)[rank],
            "norm.weight": ours["head.norm.weight"],
            "output.weight": ours["head.output.weight"].chunk(files)[rank],
            "rope.freqs": torch.ones(4),
        }
        for number in range(model.layers):
            own = {name.split(".", 2)[2]: value for name, value in ours.items() if name.startswith(f"layers.{number}.")}
            state |= {
                f"layers.{number}.{name}": value
                for name, value in {
                    "attention.wq.weight": turned(own["attention.q.weight"], model.heads).chunk(files)[rank],
                    "attention.wk.weight": turned(own["attention.k.weight"], model.kv_heads).chunk(files)[rank],
                    "attention.wv.weight": own["attention.v.weight"].chunk(files)[rank],
                    "attention.wo.weight": own["attention.o.weight"].chunk(files, 1)[rank],
                    "feed_forward.w1.weight": own["mlp.gate.weight"].chunk(files)[rank],
                    "feed_forward.w2.weight": own["mlp.down.weight"].chunk(files, 1)[rank],
                    "feed_forward.w3.weight": own["mlp.up.weight"].chunk(files)[rank],
                    "attention_norm.weight": own["attention_norm.weight"],
                    "ffn_norm.weight": own["mlp_norm.weight"],
                }.items()
            }
        state = {name: value.clone() for name, value in state.items()}
        torch.save(state, path / f"consolidated.{rank:02d}.pth")


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_files_of_every_llama_are_read(model: Model, files: int, by_rows: bool, tmp_path: Path) -> None:
    ours = random_weights(model, torch.bfloat16)
    write(tmp_path / "llama", model, ours, files, by_rows)
    found = meta.open_folder(tmp_path / "llama")
    assert found.model == model
    assert same(read(found), ours)


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_is_written_is_what_meta_would_write(model: Model, files: int, tmp_path: Path) -> None:
    ours = random_weights(model, torch.bfloat16)
    write(tmp_path / "from", model, ours)
    write(tmp_path / "expected", model, ours, files)
    found = meta.open_folder(tmp_path / "from")
    convert(found, meta.plan(found, files), tmp_path / "to", {})
    for rank in range(files):
        one, two = (torch.load(tmp_path / name / f"consolidated.{rank:02d}.pth") for name in ("to", "expected"))
        del two["rope.freqs"]
        assert same(one, two)
    again = meta.open_folder(tmp_path / "to")
    assert again.model == model
    assert same(read(again), ours)
    params = json.loads((tmp_path / "to" / "params.json").read_text())
    hidden = int(params["ffn_dim_multiplier"] * int(2 * 4 * model.width / 3))  # as Meta's code computes it
    assert -(-hidden // params["multiple_of"]) * params["multiple_of"] == model.ffn


def test_storages_that_several_tensors_share_are_read(tmp_path: Path) -> None:
    """Meta's larger models were saved from one flat tensor."""
    ours = random_weights(LLAMA)
    write(tmp_path / "llama", LLAMA, ours)
    file = tmp_path / "llama" / "consolidated.00.pth"
    state = torch.load(file)
    flat, first = torch.cat([value.flatten() for value in state.values()]), 0
    for name, value in state.items():
        state[name] = flat[first : first + value.numel()].view(value.shape)
        first += value.numel()
    torch.save(state, file)
    assert same(read(meta.open_folder(tmp_path / "llama")), ours)


REFUSED = {
    "a model of other sizes": (lambda path: write(path, LLAMA, random_weights(replace(LLAMA, width=16))), "instead of"),
    "experts": (
        lambda path: write(path, LLAMA, random_weights(LLAMA), moe={}),
        "moe = .*: no original Llama has model.experts; use another kind of files",
    ),
    "another vocabulary": (
        lambda path: write(path, LLAMA, random_weights(LLAMA), vocab_size=65),
        "must be the 64 rows",
    ),
    "more layers": (lambda path: write(path, LLAMA, random_weights(LLAMA), n_layers=3), r"lacks layers\.2\.attention"),
    "fewer layers": (
        lambda path: write(path, LLAMA, random_weights(LLAMA), n_layers=1),
        r"has not: layers\.1\.attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    make, told = REFUSED[case]
    make(tmp_path / "llama")
    with pytest.raises(InputError, match=told):
        meta.open_folder(tmp_path / "llama")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    write(tmp_path / "llama", LLAMA, random_weights(LLAMA), 4)
    (tmp_path / "llama" / "consolidated.02.pth").unlink()
    with pytest.raises(DamagedError, match=r"consolidated\.02\.pth is missing"):
        meta.open_folder(tmp_path / "llama")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"qk_norm": True}, "qk_norm = True"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"out_bias": True}, "out_bias = True"),
        ({"head_width": 12}, "head_width = 12"),
    ],
)
def test_what_an_original_llama_lacks_is_refused_by_name(change: dict[str, object], told: str, tmp_path: Path) -> None:
    write(tmp_path / "llama", LLAMA, random_weights(LLAMA))
    found = meta.open_folder(tmp_path / "llama")
    with pytest.raises(InputError, match=f"an original Llama has no .*{told}"):
        meta.plan(replace(found, model=replace(LLAMA, **change)))
