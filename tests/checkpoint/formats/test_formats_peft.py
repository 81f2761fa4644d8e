"""Adapters of PEFT: read and written as PEFT does, with its logits, losses and gradients."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_jobs import config_of, one_rank, train_and_save

from megalite.base.errors import InputError
from megalite.checkpoint.run.resume import check_start
from megalite.checkpoint.store.state import State
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.maps.families import FAMILIES
from megalite.checkpoint.weights.maps.peft import adapted
from megalite.checkpoint.weights.read import check_base, reader_of
from megalite.checkpoint.weights.sources import open_weights, read_model
from megalite.config.layout import Layout
from megalite.config.model_schema import Adapter, Target
from megalite.config.schema import Checkpoint as Saving
from megalite.config.schema import Config
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.parallel.parameter import parameters
from megalite_tools.checkpoint.convert import main

peft = pytest.importorskip("peft")

TOKENS = torch.randint(3, 64, (25, 2), generator=torch.Generator().manual_seed(1))
FUSED = {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}
LATENT_MODULES = {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
STACKED = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LATENT: list[Target] = ["query", "latent", "attention_output"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "all of qwen2": ("qwen2", {"target_modules": "all-linear", "use_rslora": True}),
    "tied": ("llama tied, all heads", {"target_modules": ["k_proj", "o_proj", "gate_proj"]}),
    "ends": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "gemma, with the embedding": (
        "gemma3, every second, capped, untied",
        {"target_modules": ["up_proj", "embed_tokens"]},
    ),
    "fused": ("phi3", FUSED),
    "dora": ("llama", {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], "use_dora": True}),
    "dora, biases": ("qwen2", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
    "dora, fused": ("phi3", {**FUSED, "use_dora": True}),
    "dora, latent": ("deepseek_v3, without experts", {**LATENT_MODULES, "use_dora": True}),
    "latent": ("deepseek_v3, without experts", LATENT_MODULES),
    "experts": ("qwen3_moe", STACKED),
    "experts, some layers, rslora": ("qwen3_moe, some layers", STACKED | {"use_rslora": True}),
    "experts in turns": ("gpt_oss", STACKED),
}
OWN: dict[str, tuple[str, Adapter]] = {  # adapters in which matrices that are one module for PEFT have their own
    "ends": ("llama", Adapter(3, 7.0, targets=["query", "embedding", "head"])),
    "fused": ("phi3, part of a head", Adapter(3, 7.0)),
    "fused, rslora": ("phi3", Adapter(3, 7.0, rslora=True)),
    "latent": ("deepseek_v3, without experts", Adapter(3, 7.0, targets=[*LATENT, "key", "value"])),
    "dora, fused": ("phi3, part of a head", Adapter(3, 7.0, dora=True)),
    "experts": ("mixtral", Adapter(2, 5.0, rslora=True)),
    "experts beside others": ("deepseek_v3", Adapter(3, 7.0, targets=[*LATENT, "experts"])),
    "experts in turns": ("gpt_oss", Adapter(3, 7.0)),
}
FILE = "adapter_model.safetensors"


def theirs(name: str, path: Path, **more: Any) -> Any:
    """PEFT's model, saved: its base in `base`, its adapter in `adapter`. more: options of the adapter."""
    case, options = ADAPTERS[name][0], ADAPTERS[name][1] | more
    model = CASES[case].save(path / "base", torch.float64, shard="1MB")
    found = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(2)
    for key, value in found.named_parameters():
        if "lora_" in key:
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.1
            value.data = value.data.double() + drawn if "magnitude" in key else drawn
    found.peft_config["default"].base_model_name_or_path = str(path / "base")
    found.save_pretrained(str(path / "adapter"))
    return found.eval()


def loss_of(model: Any) -> Tensor:
    logits = model(TOKENS.T).logits.double()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS.T[:, 1:].flatten(), reduction="sum")


def decoder_of(found: Weights) -> Decoder:
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    return Decoder(found.model, mesh.tp, range(found.model.layers)).double().to_empty(device="cpu")


@pytest.mark.parametrize("name", ADAPTERS)
def test_their_adapter_merged_computes_their_logits(name: str, tmp_path: Path) -> None:
    model, found = theirs(name, tmp_path), open_weights(f"peft:{tmp_path / 'adapter'}")
    with one_rank(), torch.no_grad():
        decoder = decoder_of(found)
        reader_of(found).fill(State({0: decoder}).weights())
        logits = decoder(TOKENS).transpose(0, 1)
        torch.testing.assert_close(logits, model(TOKENS.T).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADAPTERS)
def test_losses_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    model, found = theirs(name, tmp_path), open_weights(f"peft:{tmp_path / 'adapter'}")
    assert found.merging is not None
    assert found.dense is not None
    beside = replace(found, model=Config(model=found.model, adapter=found.merging.adapter).model)
    expected = loss_of(model)
    expected.backward()
    with one_rank():
        decoder = decoder_of(beside)
        state = State({0: decoder}, adapted=True)
        state.fill_base(reader_of(found.dense).fill_parts)
        reader_of(found.merging.factors).fill(state.held())
        loss = decoder(TOKENS[:-1], targets=TOKENS[1:])
        loss.backward()
        grads = {each.name: each.value.grad.to_local() for each in parameters(decoder) if each.value.requires_grad}
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for own, other in (("lora_b", "lora_B|embedding_A"), ("lora_m", "magnitude")):
        squares = sum(float(grad.square().sum()) for key, grad in grads.items() if own in key)
        their = [value.grad for key, value in model.named_parameters() if re.search(other, key)]
        assert squares == pytest.approx(sum(float(grad.square().sum()) for grad in their), rel=1e-5)
        assert (squares > 0) == (own == "lora_b" or "dora" in name)
    if name == "llama":
        for layer in range(found.model.layers):
            mine = grads[f"layers.{layer}.attention.q.lora_a.weight"]
            their = dict(model.named_parameters())
            key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.default.weight"
            assert (mine - their[key].grad).abs().max() < 1e-5 * mine.abs().max()


@pytest.mark.parametrize("name", ADAPTERS)
def test_files_there_and_back_are_the_same(name: str, tmp_path: Path) -> None:
    model = theirs(name, tmp_path)
    target = tmp_path / "written"
    assert main(["--from", f"peft:{tmp_path / 'adapter'}", "--to", f"peft:{target}", "--check"]) == 0
    before, after = load_file(tmp_path / "adapter" / FILE), load_file(target / FILE)
    before = {key: value for key, value in before.items() if "base_layer.weight" not in key}  # those of the base
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    again = peft.PeftModel.from_pretrained(CASES[ADAPTERS[name][0]].make(torch.float64), str(target))
    assert torch.equal(again(TOKENS.T).logits, model(TOKENS.T).logits)


@pytest.mark.parametrize("name", OWN)
def test_own_factors_are_written_as_one_pair_of_a_module(name: str, tmp_path: Path) -> None:
    case, adapter = OWN[name]
    CASES[case].save(tmp_path / "base", torch.float64)
    model = read_model(f"hf:{tmp_path / 'base'}")
    config = replace(config_of(Layout(), model), adapter=adapter)
    with one_rank():
        train_and_save(replace(config, checkpoint=Saving(weights=f"hf:{tmp_path / 'base'}")), tmp_path / "run", 2)
    (checkpoint,) = (tmp_path / "run").iterdir()
    written = tmp_path / "written"
    assert main(["--from", f"megalite:{checkpoint}", "--to", f"peft:{written}", "--check"]) == 0
    found, back = open_weights(f"megalite:{checkpoint}"), open_weights(f"peft:{written}")
    assert found.merging is not None
    assert back.merging is not None
    readers = reader_of(found.merging.factors), reader_of(back.merging.factors)
    for key, stored in back.merging.factors.index.tensors.items():
        mine, yours = torch.empty(stored.shape).double(), torch.zeros(stored.shape).double()
        for reader, tensor in zip(readers, (mine, yours), strict=True):
            reader.fill({key: tensor})
        assert mine.any()
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-7 if key.endswith("lora_m") else 0)  # norms in float32
    their = peft.PeftModel.from_pretrained(CASES[case].make(torch.float64), str(written))
    with one_rank(), torch.no_grad():
        decoder = decoder_of(found)
        reader_of(found).fill(State({0: decoder}).weights())
        expected, base = their(TOKENS.T).logits, CASES[case].make(torch.float64)(TOKENS.T).logits
        torch.testing.assert_close(decoder(TOKENS).transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
        assert (expected - base).abs().max() > 1e-3
    assert main(["--from", f"peft:{written}", "--to", f"peft:{tmp_path / 'again'}"]) == 0
    assert (written / FILE).read_bytes() == (tmp_path / "again" / FILE).read_bytes()


def test_multipliers_of_the_base_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs("llama", tmp_path)
    model = replace(read_model(f"hf:{tmp_path / 'base'}"), embedding_multiplier=2.0)
    config = config_of(Layout(), model)
    with one_rank():
        train_and_save(config, tmp_path / "plain", 1)
        (base,) = (tmp_path / "plain").iterdir()
        saving = Saving(weights=f"megalite:{base}")
        train_and_save(replace(config, adapter=Adapter(2, 4.0), checkpoint=saving), tmp_path / "run", 1)
    with pytest.raises(InputError, match="the model has multipliers"):
        open_weights(f"peft:{tmp_path / 'adapter'}", base=f"megalite:{base}")
    begun = replace(config, adapter=Adapter(2, 4.0), checkpoint=replace(saving, export="peft"))
    with pytest.raises(InputError, match=r'checkpoint.export = "peft": .*the model has multipliers'):
        check_start(begun, tmp_path / "other")
    (checkpoint,) = (tmp_path / "run").iterdir()
    assert main(["--from", f"megalite:{checkpoint}", "--to", f"peft:{tmp_path / 'written'}"]) == 2
    assert "the model has multipliers" in capsys.readouterr().err
    assert not (tmp_path / "written").exists()


def test_a_copy_of_the_base_must_be_its_tensor(tmp_path: Path) -> None:
    theirs("ends", tmp_path)
    source = f"peft:{tmp_path / 'adapter'}"
    check_base(open_weights(source))
    tensors(lambda found: found["base_model.model.lm_head.base_layer.weight"][3].mul_(2))(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"head.output.weight is another one than the adapter"):
        check_base(open_weights(source))


def test_factors_of_a_tied_embedding_are_refused(tmp_path: Path) -> None:
    theirs("tied", tmp_path, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(InputError, match="has factors of the embedding, whose weight is the head's too"):
        open_weights(f"peft:{tmp_path / 'adapter'}")


@pytest.mark.parametrize(
    ("case", "targets", "told"),
    [
        ("phi3", ["query", "value"], "one pair of factors for model.layers.0.self_attn.qkv_proj, to which key belongs"),
        ("deepseek_v3", ["up", "latent"], "PEFT takes up_proj of deepseek_v3 for a name of its experts"),
    ],
)
def test_targets_that_peft_cannot_have_are_refused(case: str, targets: list[Target], told: str, tmp_path: Path) -> None:
    CASES[case].save(tmp_path, torch.float64)
    model, adapter = read_model(f"hf:{tmp_path}"), Adapter(2, 4.0, targets=targets)
    with pytest.raises(InputError, match=told):
        adapted(FAMILIES[case], model, adapter)
    saving = Saving(weights=f"hf:{tmp_path}", export="peft")
    before = replace(config_of(Layout(), model), adapter=adapter, checkpoint=saving)
    with pytest.raises(InputError, match=rf'checkpoint.export = "peft": .*{told}.*; checkpoint.export=hf does so'):
        check_start(before, tmp_path / "run")
    check_start(replace(before, checkpoint=replace(saving, export="hf")), tmp_path / "run")


def test_a_wide_pair_is_refused_unless_it_is_of_each_matrix(tmp_path: Path) -> None:
    wide = {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 14}}
    theirs("fused", tmp_path, **wide)
    with pytest.raises(InputError, match=r"gate_up_proj.lora_B.weight is not 0 outside of blocks"):
        open_weights(f"peft:{tmp_path / 'adapter'}")

    def clear(found: dict[str, Tensor]) -> None:
        for key, value in found.items():
            if "gate_up_proj.lora_B" in key:
                value[:48, 3:] = -0.0
                value[48:, :3] = 0.0

    tensors(clear)(tmp_path / "adapter")
    assert open_weights(f"peft:{tmp_path / 'adapter'}").merging is not None


def test_adapters_are_merged_where_a_model_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs("fused", tmp_path)
    source = f"peft:{tmp_path / 'adapter'}"
    assert main(["--from", source, "--to", f"hf:{tmp_path / 'written'}"]) == 2
    assert "is an adapter; say --merge" in capsys.readouterr().err
    assert main(["--from", source, "--merge", "--to", f"hf:{tmp_path / 'written'}", "--check"]) == 0


def change(key: str, value: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return changed


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / FILE
        found = load_file(file)
        edit(found)
        save_file({key: value.contiguous() for key, value in found.items()}, file)

    return changed


LAYER = "base_model.model.model.layers.1.self_attn.q_proj"
HOSTILE = {
    "dora without norms": (change("use_dora", True), "lora_magnitude_vector is missing"),
    "norms without dora": (
        tensors(lambda found: found.update({f"{LAYER}.lora_magnitude_vector": torch.ones(32)})),
        "lora_magnitude_vector belongs to no matrix",
    ),
    "a quantized adapter": (change("use_qalora", True), "use_qalora = True: is more than LoRA's factors"),
    "another adapter": (change("peft_type", "IA3"), "peft_type = 'IA3': is another kind of adapter"),
    "a base that was changed": (change("init_lora_weights", "pissa"), "init_lora_weights = 'pissa': means a base"),
    "what is not known": (change("soon", 1), "soon = 1: is more than LoRA's factors"),
    "no rank": (change("r", 0), "r = 0: must be a whole number of at least 1"),
    "a huge rank": (change("r", 10**12), "r = 1000000000000: must be a whole number .* at most 2,147,483,647"),
    "another rank": (change("r", 4), "lora_A.weight \\[3, 32\\] instead of \\[4, 32\\]"),
    "another rank of a module": (change("rank_pattern", {"q_proj": 2}), "has 2 for model.layers.0.self_attn.q_proj"),
    "another scale of a module": (change("alpha_pattern", {"v_proj": 2}), "scales model.layers.0.self_attn.v_proj"),
    "modules that are not chosen": (
        change("target_modules", ["v_proj", "down_proj"]),
        "leaves out .*q_proj, whose fac",
    ),
    "modules that are excluded": (change("exclude_modules", ["q_proj"]), "exclude_modules = .*: leaves out .*q_proj"),
    "layers that are not chosen": (change("layers_to_transform", [0]), "leaves out model.layers.1.self_attn.q_proj"),
    "a pattern": (change("rank_pattern", {"(a+)+": 2}), "has a pattern; megalite knows names of modules"),
    "no base": (change("base_model_name_or_path", "nobody/nothing"), "is no folder here; give --base"),
    "one factor": (tensors(lambda found: found.pop(f"{LAYER}.lora_B.weight")), "q_proj.lora_B.weight is missing"),
    "the other factor": (
        tensors(lambda found: found.pop(f"{LAYER}.lora_A.weight")),
        "without the others of its module|belongs",
    ),
    "some layers": (
        tensors(lambda found: [found.pop(f"{LAYER}.lora_{each}.weight") for each in "AB"]),
        "but none for model.layers.1.self_attn.q_proj; megalite has them in all layers",
    ),
    "an embedding": (
        tensors(
            lambda found: found.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 64)})
        ),
        "lora_embedding_B is missing",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_adapters_are_refused(name: str, tmp_path: Path) -> None:
    theirs("llama", tmp_path)
    spoil, told = HOSTILE[name]
    spoil(tmp_path / "adapter")
    with pytest.raises(InputError, match=told):
        open_weights(f"peft:{tmp_path / 'adapter'}")


def test_a_base_is_for_adapters_alone(tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path / "hf", shard="1MB")
    with pytest.raises(InputError, match="is no adapter, so it cannot be added to hf:"):
        open_weights(f"hf:{tmp_path / 'hf'}", base=f"hf:{tmp_path / 'hf'}")
