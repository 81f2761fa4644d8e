"""Every family in both directions: what transformers saved computes the same here, and what we write the same there."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES, GEMMA, LINEAR, LONG, SIZES, Case, transformers
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_jobs import one_rank

from megalite.base.errors import InputError
from megalite.checkpoint.store.state import State
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import huggingface
from megalite.checkpoint.weights.formats.tokenizer import ends_in
from megalite.checkpoint.weights.maps.families import FAMILIES, UNSUPPORTED_FAMILIES, family_of, read_config
from megalite.checkpoint.weights.maps.family import Family
from megalite.checkpoint.weights.maps.fields import Fields
from megalite.checkpoint.weights.maps.models import plain_model
from megalite.checkpoint.weights.maps.rope import rope, rope_fields
from megalite.checkpoint.weights.maps.woven import groups
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.checkpoint.weights.woven import interleaved
from megalite.config.layout import Layout
from megalite.config.load import load
from megalite.config.model_schema import SCALING_KEYS, Attention, Experts, Latent, Model, RopeScaling
from megalite.distributed.mesh import Mesh
from megalite.model.decoder import Decoder
from megalite.model.init import initialize
from megalite.parallel.parameter import cut, parameters

TOLERANCE = 1e-5  # relative, in float32
TOKENS = torch.randint(3, 64, (2, 25), generator=torch.Generator().manual_seed(1))


def decoder_of(source: str) -> Decoder:
    found = open_weights(source)
    mesh = Mesh.build(Layout(), torch.device("cpu"))
    assert mesh is not None
    decoder = Decoder(found.model, mesh.tp, range(found.model.layers + found.model.depth)).to_empty(device="cpu")
    initialize(decoder, found.model, 0)  # padding, too
    reader_of(found).fill(State({0: decoder}).weights())
    return decoder


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = CASES[name].save(tmp_path / "theirs")
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:].contiguous()
    expected = theirs(input_ids=inputs, labels=targets, shift_labels=targets)
    (expected.loss * targets.numel()).backward()
    with one_rank():
        ours = decoder_of(str(tmp_path / "theirs"))
        assert distance(ours(inputs.T).transpose(0, 1), expected.logits) < TOLERANCE
        loss = ours(inputs.T, targets=targets.T)
        loss.backward()
        assert distance(loss, expected.loss * targets.numel()) < TOLERANCE
        gradients = {key: cut(param.grad, shape).to_local() for key, param, _, shape in parameters(ours)}
    family, model = read_config(tmp_path / "theirs")[0], open_weights(str(tmp_path / "theirs")).model
    named = dict(theirs.named_parameters())
    table = family.table(model, stacked_experts=model.experts is not None)
    corrections = {key for key, _ in theirs.named_buffers() if key.endswith("correction_bias")}
    assert table.keys() == named.keys() | corrections
    for key, made in table.items():
        if key in corrections:  # no gradient changes it
            continue
        rows = {strip.name: gradients[strip.name].reshape(-1, strip.width) for strip in made.strips}
        if made.turns:
            parts = [[rows[strip.name][slice(*strip.rows)] for strip in each] for each in groups(made)]
            found = torch.stack([interleaved(each, len(made.shape) == 3) for each in parts]).view(made.shape)
        else:
            found = torch.cat([rows[strip.name][slice(*strip.rows)] for strip in made.strips]).view(made.shape)
        assert distance(found, named[key].grad) < 10 * TOLERANCE, key  # sums of many rounded terms


@pytest.mark.parametrize("name", CASES)
def test_what_we_write_computes_the_same_in_transformers(name: str, tmp_path: Path) -> None:
    """Without its config.json at hand, so that ours is written."""
    theirs = CASES[name].save(tmp_path / "theirs")
    found = replace(open_weights(str(tmp_path / "theirs")), companions=())
    convert(found, huggingface.plan(found, None, 20_000), tmp_path / "ours", {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(loaded) is type(theirs)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, theirs(input_ids=TOKENS).logits)
    ours = {key: value for key, value in loaded.state_dict().items() if value.dtype == torch.float32}
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.items())
    assert read_config(tmp_path / "ours")[1] == found.model


@pytest.mark.parametrize("begins", ["language_model.", ""])
def test_the_text_part_of_a_model_with_images_is_read_alone(begins: str, tmp_path: Path) -> None:
    """Published files begin the names of its tensors otherwise than transformers' memory does."""
    text = transformers.Gemma3TextConfig(**SIZES | GEMMA)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    theirs = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    if not begins:
        tensors = {name: value.contiguous() for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
        save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert any(name.startswith(begins or "model.language_model.") for name in names)
    with one_rank(), torch.no_grad():
        ours = decoder_of(str(tmp_path / "theirs"))(TOKENS.T).transpose(0, 1)
    assert distance(ours, theirs(input_ids=TOKENS).logits) < TOLERANCE
    found = open_weights(str(tmp_path / "theirs"))
    convert(found, huggingface.plan(found, None, None), tmp_path / "ours", {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert isinstance(loaded, transformers.Gemma3ForCausalLM)
    with torch.no_grad():
        assert distance(loaded(input_ids=TOKENS).logits, ours) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu': is another activation than gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: must be above 0"),
        ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0: caps scores, which transformers does not"),
        ({"use_bidirectional_attention": True}, "lets tokens attend to later ones, which megalite lacks"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size = 32: must be a multiple of"),
        (
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "of sliding_attention scales RoPE, which megalite's layers with windows lack",
        ),
        ({"rope_parameters": {"full_attention": 7}}, "must have an object for full_attention"),
    ],
)
def test_what_gemma_may_have_and_megalite_lacks_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    CASES["gemma3"].save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(InputError, match=re.escape(told)):
        read_config(tmp_path)


def test_the_config_json_of_a_published_gemma3_is_read(tmp_path: Path) -> None:
    """It is of transformers 4, and leaves out what is the default there."""
    text = {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    family, model = read_config(tmp_path)
    assert family.model_type == "gemma3_text"
    assert replace(model, sequence_length=32768) == load(["configs/model/gemma3_27b.yaml"]).model


@pytest.mark.parametrize("old", [False, True])
def test_both_ways_of_writing_rope_are_read(old: bool, tmp_path: Path) -> None:
    CASES["llama 3.1"].save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    if old:
        section = fields.pop("rope_parameters")
        fields |= {"rope_theta": section.pop("rope_theta"), "rope_scaling": section}
        section["type"] = section.pop("rope_type")
        (tmp_path / "config.json").write_text(json.dumps(fields))
    model = read_config(tmp_path)[1]
    assert (model.rope_theta, model.rope_scaling) == (500.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 16))


@pytest.mark.parametrize("name", ["phi3, long", "phi3, given attention factor"])
@pytest.mark.parametrize("called", ["longrope", "su", "yarn"])
def test_the_config_json_of_a_published_phi3_is_read(name: str, called: str, tmp_path: Path) -> None:
    """Its keys are those of transformers 4, and so are ours."""
    Case("Phi3", CASES[name].options).save(tmp_path / "new")
    (tmp_path / "old").mkdir()
    fields = json.loads((tmp_path / "new" / "config.json").read_text())
    section = fields.pop("rope_parameters")
    old = {key: section[key] for key in ("short_factor", "long_factor", "attention_factor") if key in section}
    fields |= {"rope_scaling": {"type": called, **old}}
    fields |= {key: section[key] for key in ("rope_theta", "partial_rotary_factor")}
    (tmp_path / "old" / "config.json").write_text(json.dumps(fields))
    family, model = read_config(tmp_path / "old")
    assert model == read_config(tmp_path / "new")[1]
    assert model.rotary_width == 6
    assert model.rope_scaling is not None
    assert model.rope_scaling.factor == 32 / model.rope_scaling.original_length
    ours = family.config(model, "float32")
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        assert ours[key] == fields[key]
    assert ours["rope_scaling"] == {**fields["rope_scaling"], "type": "longrope"}


@pytest.mark.parametrize(("heads", "rotary"), [(head, part) for head in (50, 98, 96) for part in range(2, head, 2)])
def test_a_part_of_a_head_is_found_again(heads: int, rotary: int) -> None:
    """transformers rounds the product of a share and a width down: 98 · (2 / 98) is 2, but not that of all numbers."""
    model = Model(width=heads * 2, heads=2, kv_heads=2, rotary_width=rotary)
    told = rope_fields(model)["partial_rotary_factor"]
    assert int(heads * told) == rotary


def test_scalings_that_a_family_does_not_know_are_not_written_for_it() -> None:
    """transformers refuses a Phi-3 with them."""
    model = Model(rope_scaling=RopeScaling("linear", 2.0))
    assert family_of(model, "phi3").model_type == "llama"
    with pytest.raises(InputError, match="rope_type = 'linear': is no RoPE scaling of phi3 in transformers"):
        FAMILIES["phi3"].model(Fields("config.json", FAMILIES["phi3"].config(model, "float32")))


models = some.builds(
    Model,
    layers=some.integers(1, 5),
    width=some.just(64),
    heads=some.just(4),
    kv_heads=some.sampled_from([1, 2, 4]),
    head_width=some.sampled_from([None, 8, 16]),
    ffn=some.integers(1, 99),
    vocab_size=some.integers(1, 999),
    sequence_length=some.integers(1, 99),
    rope_theta=some.floats(1, 1e7),
    rope_scaling=some.none()
    | some.builds(
        RopeScaling,
        some.sampled_from([*SCALING_KEYS]),
        some.floats(1, 64),
        original_length=some.integers(1, 99),
        attention_factor=some.none() | some.floats(1, 2),
        short_factors=some.none() | some.just([1.0, 2.0, 4.0]),
        long_factors=some.none() | some.just([1.0, 3.0, 9.0]),
    ),
    rotary_width=some.none() | some.just(6),
    norm=some.sampled_from(["pre", "post"]),
    qk_norm_width=some.sampled_from(["head", "all"]),
    norm_eps=some.floats(1e-9, 0.1),
    tie_embeddings=some.booleans(),
    qk_norm=some.booleans(),
    qkv_bias=some.booleans(),
    attention=some.builds(
        Attention,
        some.none() | some.integers(1, 99),
        some.none() | some.integers(2, 4),
        some.none() | some.just(30.0),
        nope_every=some.none() | some.integers(1, 6),
        sinks=some.booleans(),
        latent=some.none()
        | some.builds(Latent, some.none() | some.integers(1, 9), some.integers(1, 9), some.integers(1, 16)),
    ),
    experts=some.none()
    | some.builds(
        Experts,
        some.integers(2, 9),
        some.integers(1, 2),
        some.none() | some.integers(1, 99),
        some.integers(0, 5),
        some.integers(1, 3),
        normalize=some.booleans(),
        scores=some.sampled_from(["softmax", "sigmoid"]),
        correction_rate=some.none() | some.just(0.001),
        shared_width=some.none() | some.sampled_from([8, 16]),
    ),
    init_std=some.floats(1e-3, 1),
)


@given(model=models, preferred=some.sampled_from([None, *FAMILIES]))
def test_a_config_means_the_model_it_was_written_for_or_is_refused(model: Model, preferred: str | None) -> None:
    try:
        family = family_of(model, preferred)
    except InputError:
        return  # what is refused, and how, has tests of its own
    again = family.model(Fields("config.json", json.loads(json.dumps(family.config(model, "bfloat16")))))
    if model.rope_scaling is not None and model.rope_scaling.kind == "dynamic":
        again = replace(again, sequence_length=model.sequence_length)  # which gives way to the original length
    assert plain_model(again) == plain_model(model)


def test_every_preset_has_a_family() -> None:
    presets = sorted(Path("configs/model").glob("*.yaml"))
    assert presets
    for preset in presets:
        assert family_of(load([str(preset)]).model).model_type in FAMILIES, preset


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"model_type": "llama4_text"},
            "needs attention in chunks, queries that are scaled by their positions, norms of",
        ),
        ({"model_type": "madeup"}, "is a family that megalite does not know; known are llama, mistral"),
        ({"model_type": None}, "is a family that megalite does not know"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': is another activation than SwiGLU's"),
        ({"attention_bias": True}, "attention_bias = True: means a bias of attention's output too"),
        ({"mlp_bias": True}, "means biases of the feed-forward"),
        ({"quantization_config": {"bits": 4}}, "quantized weights; turn them into bf16 first"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, "is a kind of RoPE scaling that megalite"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "factor = None: must be a number"),
        ({"rope_parameters": LONG | {"long_factor": [1.0, "7"]}}, "long_factor = '7': must be a number"),
        ({"rope_parameters": LONG | {"long_factor": 7}}, "long_factor = 7: must be a list of numbers"),
        (
            {"rope_parameters": LONG},
            "model.rope_scaling.short_factors: has 3 numbers; must be a list of 4 numbers with model.rope_scaling.kind",
        ),
        (
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5: turns a part of every head, which llama does not",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "mscale": 1}}, "mscale = 1: changes RoPE"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta = 'big': must be a number"),
        ({"rope_parameters": 7}, "rope_parameters = 7: must be an object or null"),
        ({"hidden_size": "32"}, "hidden_size = '32': must be a whole number of at least 1"),
        ({"hidden_size": 1 << 40}, "must be a whole number of at least 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers = None: must be a whole number"),
        ({"num_key_value_heads": 3}, "means a model that cannot be: model.heads = 4"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"rms_norm_eps": float("nan")}, "must be a number"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(InputError) as raised:
        open_weights(str(tmp_path))
    assert told in str(raised.value)
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_more_layers_than_any_model_has_are_refused_before_lists_of_them(family: Family) -> None:
    def features(fields: Fields, model: Model) -> Any:
        pytest.fail(f"{model.layers} layers are asked for their features")

    fields = Fields("config.json", {**SIZES, "num_hidden_layers": 2_000_000_000})
    with pytest.raises(InputError, match="num_hidden_layers = 2000000000: must be at most 10,000: more than any model"):
        replace(family, features=features).model(fields)


def test_what_families_lack_is_what_transformers_says_of_them() -> None:
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    assert UNSUPPORTED_FAMILIES.keys() <= set(configs.keys())
    for name, lacks in UNSUPPORTED_FAMILIES.items():
        outer = configs[name]()
        config = getattr(outer, "text_config", outer)
        numbers = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = any(hasattr(config, key) for key in numbers)
        assert experts or "experts" not in lacks, name
        assert not any(each in lacks for each in ("shared experts", "of embeddings", "of logits")), (
            name
        )  # which layers have
        assert hasattr(outer, "vision_config") == ("images" in lacks), name
        told = {
            getattr(config, key, None)
            for key in ("hidden_act", "hidden_activation", "activation", "activation_function")
        }
        if name not in ("bloom", "mpt"):  # these do not tell it
            assert any(str(each).startswith("gelu") for each in told) == ("GELU" in lacks), name
            assert ("relu2" in told) == ("squared ReLU" in lacks), name


@pytest.mark.parametrize("name", ["olmo", "falcon", "llama4", "gemma3n", "qwen3_next"])
def test_a_folder_of_a_family_that_lacks_something_is_refused_with_it(name: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=f"model_type = '{name}': needs {UNSUPPORTED_FAMILIES[name]}, which megalite's layers lack"
    ):
        read_config(tmp_path)


LATENT_PRESETS = {  # keys of published files that tell latent attention
    "deepseek_v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "v_head_dim": 128,
    },
    "deepseek_v2": {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "v_head_dim": 128,
    },
}


@pytest.mark.parametrize("name", LATENT_PRESETS)
def test_latent_attention_of_published_files_is_read(name: str, tmp_path: Path) -> None:
    fields = {"model_type": name, **LATENT_PRESETS[name]}
    dense = {"first_k_dense_replace": fields["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | dense))
    family, model = read_config(tmp_path)
    mscale = fields["rope_scaling"]["mscale"]
    assert (model.head_width, model.rotary_width, model.kv_heads) == (192, 64, model.heads)
    assert model.attention == Attention(latent=Latent(fields["q_lora_rank"], 512, 128))
    assert model.rope_scaling == RopeScaling("yarn", 40.0, original_length=4096, mscale=mscale, mscale_all_dim=mscale)
    written = family.config(model, "bfloat16")
    assert {key: written[key] for key in fields if key != "rope_scaling"} == {
        key: value for key, value in fields.items() if key != "rope_scaling"
    }
    assert "partial_rotary_factor" not in written


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1: must be a whole number"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2: must be num_attention_heads"),
        ({"rope_interleave": False}, "rope_interleave = False: means that features half of a head apart turn together"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0, "mscale": 1}},
            "mscale = 1: changes",
        ),
        ({"qk_rope_head_dim": 7}, "model.rotary_width = 7: must be even"),
        ({"v_head_dim": 19}, "model.attention.latent.value_width = 19: must be at most the width of a head, 18"),
    ],
)
def test_latent_attention_that_megalite_lacks_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    CASES["deepseek_v3"].save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(InputError) as raised:
        open_weights(str(tmp_path))
    assert told in str(raised.value)


def test_files_of_meta_have_no_latent_attention(tmp_path: Path) -> None:
    kind, elsewhere = "meta", r"no original Llama has model\.attention\.latent; use another kind of files"
    for name in ("deepseek_v3, without experts", "llama"):
        CASES[name].save(tmp_path / name)
    found, other = (open_weights(str(tmp_path / name)) for name in ("deepseek_v3, without experts", "llama"))
    with pytest.raises(InputError, match=elsewhere):
        plan_of(kind, found, tmp_path / "out", Wanted())
    convert(other, plan_of(kind, other, tmp_path / "theirs", Wanted()), tmp_path / "theirs", {})
    with pytest.raises(InputError, match=elsewhere):
        open_weights(str(tmp_path / "theirs"), found.model)


def test_swish_is_silu(tmp_path: Path) -> None:
    for name in ("swish", "silu"):
        Case("Llama", {"hidden_act": name}).save(tmp_path / name)
    assert read_config(tmp_path / "swish") == read_config(tmp_path / "silu")


def test_no_family_is_both_known_and_lacking() -> None:
    assert not FAMILIES.keys() & UNSUPPORTED_FAMILIES.keys()


def test_windows_that_no_model_here_has_are_refused(tmp_path: Path) -> None:
    types = ["sliding_attention", *["full_attention"] * 3]
    Case("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": types}).save(tmp_path)
    with pytest.raises(InputError, match="megalite has windows in all layers, or in all but every n-th"):
        open_weights(str(tmp_path))


def test_a_window_that_is_left_out_is_that_of_transformers(tmp_path: Path) -> None:
    Case("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}).save(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["sliding_window"], fields["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path)[1].attention == Attention(theirs.sliding_window)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding_must_be_the_same(same: bool, tmp_path: Path) -> None:
    """Some published folders hold it twice; transformers does not tie what differs."""
    library = pytest.importorskip("safetensors.torch")
    CASES["llama tied, all heads"].save(tmp_path, shard="1MB")
    tensors = library.load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else -1)
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if same:
        assert open_weights(str(tmp_path)).model.tie_embeddings
    else:
        with pytest.raises(InputError, match=r"lm_head.weight is not model.embed_tokens.weight, though"):
            open_weights(str(tmp_path))


def test_tensors_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    CASES["llama"].save(tmp_path, shard="1MB")
    tensors = library.load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    library.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model.head.norm.weight is of int8; weights must be of float64, float32"):
        open_weights(str(tmp_path))


@pytest.mark.parametrize(("told", "ends"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_the_tokens_that_end_texts_are_found(told: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    assert ends_in(tmp_path) == ends


PLAIN = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 64}


def test_a_null_in_a_section_of_rope_is_as_if_it_were_left_out() -> None:
    section = {"rope_type": None, "type": "linear", "factor": 2.0, "rope_theta": None}
    found = rope(Fields("config.json", {**PLAIN, "rope_theta": 5e5, "rope_scaling": section}))
    assert found == (5e5, RopeScaling("linear", 2.0), 1.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "gives some layers a RoPE of their own"),
        ({"partial_rotary_factor": 1e300}, r"partial_rotary_factor = 1e\+300: must be above 0 and at most 1"),
        ({"partial_rotary_factor": -0.5}, "must be above 0 and at most 1"),
        ({"partial_rotary_factor": 0}, "must be above 0 and at most 1"),
    ],
)
def test_a_rope_that_is_none_is_refused_by_its_own_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        rope(Fields("config.json", {**PLAIN, **change}))
