"""Megatron's files that are old, odd, damaged or malicious: read, or refused with one message and nothing run."""

import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import (
    FIRST,
    MODELS,
    SMALL,
    arguments,
    changed,
    random_weights,
    read,
    same,
    write_dist,
    write_legacy,
)

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.formats import megatron, torch_dist
from megalite.checkpoint.weights.maps.megatron import Split
from megalite.checkpoint.weights.maps.megatron_arguments import model_of
from megalite.config.model_schema import Attention, RopeScaling

FILE = "iter_0000010/mp_rank_01_001/model_optim_rng.pt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_legacy(tmp_path / "megatron", SMALL, random_weights(SMALL), 2, 2)
    return tmp_path / "megatron"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


OLD_NAMES = {
    "decoder.layers": "language_model.encoder.layers",
    "decoder.final_layernorm": "language_model.encoder.final_norm",
    "embedding.": "language_model.embedding.",
    "output_layer.": "language_model.output_layer.",
    "self_attention.linear_qkv.layer_norm_weight": "input_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_norm.weight",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def nested(state: dict[str, Any]) -> dict[str, Any]:
    """As before Megatron-Core: dictionaries of dictionaries, and other names."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        first, second, rest = name.split(".", 2)
        found.setdefault(first, {}).setdefault(second, {})[rest] = value
    return found


def test_models_from_before_megatron_core_are_read(folder: Path) -> None:
    for file in folder.glob("*/*/*.pt"):
        changed(folder, lambda content: content.update(model=nested(content["model"])), str(file.relative_to(folder)))
    assert same(read(megatron.open_folder(folder)), random_weights(SMALL))


def test_names_without_transformer_engine_are_read(tmp_path: Path) -> None:
    write_legacy(tmp_path, SMALL, random_weights(SMALL), 2, local=True)
    assert same(read(megatron.open_folder(tmp_path)), random_weights(SMALL))


def test_optimizer_and_random_numbers_beside_the_model_do_no_harm(tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.zeros(3), "step": 1}}, "param_groups": [{"betas": (0.9, 0.95)}]}
    write_legacy(tmp_path, SMALL, random_weights(SMALL), optimizer=state, rng_state=[torch.get_rng_state()])
    assert same(read(megatron.open_folder(tmp_path)), random_weights(SMALL))


def test_stages_of_different_sizes_are_read(folder: Path) -> None:
    """As --decoder-first-pipeline-num-layers makes them: here three layers, then one."""
    for rank in range(2):
        names = [f"iter_0000010/mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt" for stage in range(2)]
        first, second = (torch.load(folder / name, weights_only=False) for name in names)
        for name in [name for name in second["model"] if name.startswith("decoder.layers.")]:
            value = second["model"].pop(name)
            if name.startswith("decoder.layers.0."):
                first["model"][name.replace("layers.0", "layers.2")] = value
            else:
                second["model"][name.replace("layers.1", "layers.0")] = value
        torch.save(first, folder / names[0])
        torch.save(second, folder / names[1])
    assert same(read(megatron.open_folder(folder)), random_weights(SMALL))


def test_the_true_vocabulary_of_a_null_tokenizer_has_one_more() -> None:
    told = arguments(SMALL) | {"vocab_size": 299, "tokenizer_type": "NullTokenizer"}
    assert model_of(told, "file").vocab_size == 300
    assert model_of(told | {"vocab_size": None}, "file").vocab_size == 384


ARGUMENTS = {
    "window": ({"window_size": (7, 0)}, replace(SMALL, attention=Attention(8))),
    "alternating": ({"window_size": (7, 0), "window_attn_skip_freq": 2}, replace(SMALL, attention=Attention(8, 2))),
    "no window": ({"window_size": (-1, 0)}, SMALL),
    "scaling": (
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        replace(SMALL, rope_scaling=RopeScaling(factor=32.0)),
    ),
    "old epsilon": ({"norm_epsilon": None, "layernorm_epsilon": 1e-6}, SMALL),
    "old positions": ({"position_embedding_type": None, "use_rotary_position_embeddings": True}, SMALL),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_mean_a_model(case: str) -> None:
    more, model = ARGUMENTS[case]
    told = {key: value for key, value in (arguments(SMALL) | more).items() if value is not None}
    assert model_of(told, "file") == model


REFUSED = {
    "layer norms": ({"normalization": "LayerNorm"}, "normalization = 'LayerNorm': is another norm than RMSNorm"),
    "no norm is told": ({"normalization": None}, "normalization = 'LayerNorm'"),
    "learned positions": ({"position_embedding_type": "learned_absolute"}, "another kind of positions"),
    "biases": ({"add_bias_linear": True}, "means biases of all linear layers"),
    "zero-centred norms": ({"apply_layernorm_1p": True}, r"norms of 1 \+ weight"),
    "a part of RoPE": ({"rotary_percent": 0.5}, "turns a part of every head"),
    "GELU": ({"swiglu": False}, "another activation than SwiGLU"),
    "no number": ({"hidden_size": "64"}, "hidden_size = '64': must be a whole number"),
    "a number of no float": ({"rotary_base": 10**400}, "rotary_base = .*: must be a number"),
    "no number at all": ({"norm_epsilon": float("nan")}, "must be a number"),
    "a huge number": ({"num_layers": 10**30}, "must be a whole number"),
    "heads that do not divide": ({"num_query_groups": 3}, "means a model that cannot be"),
    "a vocabulary above its padding": ({"vocab_size": 500}, "must be at most padded_vocab_size = 384"),
    "a window on both sides": ({"window_size": (7, 7)}, "window_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_megalite_lacks_is_refused_by_name(case: str) -> None:
    more, told = REFUSED[case]
    with pytest.raises(InputError, match=told):
        model_of(arguments(SMALL) | more, "file")


def test_values_that_are_nested_deep_are_told(folder: Path) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match=r"num_layers = .*: must be a whole number"):
        model_of(arguments(SMALL) | {"num_layers": deep}, "file")
    remade(folder, lambda _: b"\x80\x02}X\x12\0\0\0checkpoint_version" + b"]" * 100_000 + b"a" * 99_999 + b"s.")
    with pytest.raises(DamagedError, match=r"checkpoint_version .* instead of 3\.0"):
        megatron.open_folder(folder)


def test_what_megatron_lacks_is_refused_by_name(folder: Path) -> None:
    found = megatron.open_folder(folder)
    for model, told in {
        "softcap = 30": replace(SMALL, attention=Attention(softcap=30.0)),
        "norm = both": replace(SMALL, norm="both"),
        "norm_gain = one_plus_weight": replace(SMALL, norm_gain="one_plus_weight"),
        "activation = gelu": replace(SMALL, activation="gelu"),
        "logits_softcap = 30": replace(SMALL, logits_softcap=30.0),
        "attention.scale = 0.5": replace(SMALL, attention=Attention(scale=0.5)),
        "window_rope_theta = 50": replace(SMALL, attention=Attention(9, window_rope_theta=50.0)),
        "sinks = True": replace(SMALL, attention=Attention(sinks=True)),
        "out_bias = True": replace(SMALL, out_bias=True),
        "rope_scaling.low_frequency_factor = 2": replace(SMALL, rope_scaling=RopeScaling("llama3", 8.0, 2.0)),
    }.items():
        with pytest.raises(InputError, match=f"Megatron has no arguments for .*{model}"):
            megatron.plan(replace(found, model=told))


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (Split(3), "tensor-parallel size 3: does not divide model.heads = 8"),
        (Split(8), "tensor-parallel size 8: does not divide model.kv_heads = 4"),
        (Split(1, 3), "do not divide model.layers = 4"),
        (Split(1, 1, 2), "2 virtual stages: Megatron has none without pipeline parallelism"),
    ],
)
def test_layouts_that_cannot_be_are_refused(split: Split, told: str, folder: Path) -> None:
    with pytest.raises(InputError, match=told):
        megatron.plan(megatron.open_folder(folder), split)


def remade(path: Path, change: Callable[[bytes], bytes], record: str = "data.pkl") -> None:
    """The first file with another content of a record."""
    file = path / FIRST
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, change(content) if name.endswith(f"/{record}") else content)


def without_a_rank(path: Path) -> None:
    shutil.rmtree((path / FILE).parent)


def old_file(path: Path) -> None:
    content = torch.load(path / FIRST, weights_only=False)
    torch.save(content, path / FIRST, _use_new_zipfile_serialization=False)


def cut(path: Path) -> None:
    with (path / FILE).open("r+b") as file:
        file.truncate((path / FILE).stat().st_size // 2)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing rank": (without_a_rank, r"mp_rank_01_001 is missing: there are 3 of 2 · 2 ranks"),
    "a rank without a file": (lambda path: (path / FILE).unlink(), "mp_rank_01_001 holds no model_optim_rng.pt"),
    "a folder of four numbers": (
        lambda path: (path / "iter_0000010/mp_rank_00_000_000_000").mkdir(),
        "is no folder of a tensor- and a pipeline-parallel rank, or of one with experts",
    ),
    "a folder of experts": (
        lambda path: (path / "iter_0000010/mp_rank_00_000_000").mkdir(),
        r"mp_rank_00_000_000 holds no model_optim_rng\.pt",
    ),
    "a file of before torch 1.6": (old_file, "is no file of torch 1.6 or later; load it with torch, and save it again"),
    "a file that was cut": (cut, r"mp_rank_01_001/model_optim_rng\.pt is no"),
    "an empty file": (lambda path: (path / FILE).write_bytes(b""), "is no file of torch 1.6"),
    "a link to nowhere": (
        lambda path: ((path / FILE).unlink(), (path / FILE).symlink_to("nowhere")),
        "holds no model_optim_rng.pt",
    ),
    "another order of groups": (
        lambda path: changed(path, lambda content: content.update(checkpoint_version=2.0)),
        r"has the checkpoint_version 2\.0 instead of 3\.0",
    ),
    "a list": (lambda path: torch.save([], path / FIRST), "holds something else than a dictionary"),
    "a model that is a list": (lambda path: changed(path, lambda content: content.update(model=[])), "no dictionary"),
    "a model and virtual stages": (
        lambda path: changed(path, lambda content: content.update(model0={})),
        "holds model and model0 instead of model, or model0",
    ),
    "no arguments": (
        lambda path: changed(path, lambda content: content.pop("args")),
        "has no arguments that tell the model; give its configuration",
    ),
    "a tensor that is missing": (
        lambda path: changed(path, lambda content: content["model"].popitem(), FILE),
        r"mp_rank_01_001/model_optim_rng\.pt lacks output_layer\.weight",
    ),
    "a tensor too many": (
        lambda path: changed(path, lambda content: content["model"].update(more=torch.ones(1)), FILE),
        "has what its model has not: more",
    ),
    "a number in place of a tensor": (
        lambda path: changed(
            path, lambda content: content["model"].update({"decoder.final_layernorm.weight": 1}), FILE
        ),
        r"has decoder\.final_layernorm\.weight, which is no tensor",
    ),
    "a tensor of another shape": (
        lambda path: changed(
            path, lambda c: c["model"].update({"decoder.final_layernorm.weight": torch.ones(3)}), FILE
        ),
        r"mp_rank_01_001/model_optim_rng\.pt has decoder\.final_layernorm\.weight \[3\] instead of \[16\]",
    ),
    "a tensor of another dtype": (
        lambda path: changed(
            path, lambda c: c["model"].update({"output_layer.weight": c["model"]["output_layer.weight"].half()}), FILE
        ),
        r"has parts of model\.head\.output\.weight that do not belong together",
    ),
    "elements in another order": (
        lambda path: changed(path, lambda c: c["model"].update({"output_layer.weight": torch.ones(16, 192).t()}), FILE),
        r"holds output_layer\.weight in another order of elements",
    ),
    "two tensors in one storage": (
        lambda path: changed(
            path,
            lambda c: c["model"].update(
                {
                    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": c["model"][
                        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
                    ]
                }
            ),
        ),
        "gives the same bytes to two chunks",
    ),
    "a gap in the layers": (
        lambda path: changed(
            path, lambda c: c.update(model={k.replace("layers.1", "layers.7"): v for k, v in c["model"].items()})
        ),
        r"has layers \[0, 7\] instead of 0, 1",
    ),
    "fewer layers than told": (
        lambda path: changed(path, lambda content: setattr(content["args"], "num_layers", 5)),
        "has 4 layers in 2 stages instead of 5",
    ),
    "numbers of another machine": (lambda path: remade(path, lambda _: b"big", "byteorder"), "another order of bytes"),
    "a pickle bomb": (lambda path: changed(path, lambda content: content["model"].update(more=Bomb())), "no tensor"),
    "arguments that run something": (lambda path: changed(path, lambda c: c.update(args=Bomb())), "no arguments"),
    "a file that is a bomb": (lambda path: torch.save(Bomb(), path / FIRST), "something else than a dictionary"),
    "a pickle that is none": (lambda path: remade(path, lambda _: b"\x80\x02."), r"model_optim_rng\.pt"),
    "a pickle in a pickle": (
        lambda path: remade(path, lambda _: b"\x80\x02" + b"]" * 99_999 + b"."),
        r"model_optim_rng\.pt",
    ),
    "a tracker of another kind": (
        lambda path: (path / "latest_checkpointed_iteration.txt").write_text("../../etc"),
        "holds '../../etc' instead of the number of an iteration",
    ),
    "a tracker to nowhere": (
        lambda path: (path / "latest_checkpointed_iteration.txt").write_text("11"),
        "names iter_0000011, which is not there",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_folder_is_refused(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    damage, told = DAMAGES[case]
    damage(folder)
    with pytest.raises(InputError, match=told):
        read(megatron.open_folder(folder))
    assert not Path("executed").exists()


def test_a_record_beyond_its_file_is_refused(folder: Path) -> None:
    """The directory of the archive says that the first tensor lies elsewhere."""
    data = bytearray((folder / FIRST).read_bytes())
    struct.pack_into("<I", data, data.rindex(b"model_optim_rng/data/0") - 4, 0x7FFF_FFFF)
    (folder / FIRST).write_bytes(data)
    with pytest.raises(DamagedError, match=r"model_optim_rng\.pt"):
        read(megatron.open_folder(folder))


def test_arguments_may_be_a_dictionary(folder: Path) -> None:
    """As some tools save them."""
    changed(folder, lambda content: content.update(args=vars(content["args"])))
    found = megatron.open_folder(folder)
    assert found.model == SMALL
    assert same(read(found), random_weights(SMALL))


DIST: dict[str, tuple[Callable[[Path], object], str]] = {
    "another format": (
        lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}'),
        "has the sharded_backend 'zarr' instead of 'torch_dist'",
    ),
    "a later version": (
        lambda path: (path / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 2}'
        ),
        "has the sharded_backend_version 2 instead of 1",
    ),
    "no arguments": (lambda path: (path / "common.pt").unlink(), "no arguments that tell the model"),
    "a bomb": (lambda path: torch.save(Bomb(), path / "common.pt"), "no arguments that tell the model"),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp is missing"),
}


@pytest.mark.parametrize("case", DIST)
def test_a_damaged_torch_dist_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dist(tmp_path / "megatron", SMALL, random_weights(SMALL))
    damage, told = DIST[case]
    damage(tmp_path / "megatron" / "iter_0000010")
    with pytest.raises(InputError, match=told):
        read(torch_dist.open_folder(tmp_path / "megatron"))
    assert not Path("executed").exists()


def test_tensors_that_the_model_does_not_have_are_told(tmp_path: Path) -> None:
    more = {"mtp.layers.0.weight": torch.ones(2), "optimizer.state.exp_avg.output_layer.weight": torch.ones(2)}
    write_dist(tmp_path, SMALL, random_weights(SMALL), **more)
    with pytest.raises(DamagedError, match=r"\.metadata has what its model has not: mtp\.layers\.0\.weight$"):
        torch_dist.open_folder(tmp_path)


def test_a_given_model_stands_in_for_arguments(tmp_path: Path) -> None:
    model = MODELS["head norms"]
    write_dist(tmp_path, model, random_weights(model))
    (tmp_path / "iter_0000010" / "common.pt").unlink()
    assert same(read(torch_dist.open_folder(tmp_path, model)), random_weights(model))
