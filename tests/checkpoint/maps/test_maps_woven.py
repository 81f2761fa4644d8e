"""gpt-oss's tensors: boxes of our matrices out of theirs, transposed and in turns, and out of blocks of 4 bits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hf_families import GPT_OSS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import dcp, huggingface
from megalite.checkpoint.weights.maps.woven import Woven
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.woven import fill, unpacked
from megalite.plan.model.weights import weights

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
FILE = "model.safetensors"
COUNT, OUT, IN = 3, 7, 64
PACKED = Case("GptOss", GPT_OSS | {"hidden_size": 32, "intermediate_size": 64})
MATRICES = ("gate_up_proj", "down_proj")


def numbers(*shape: int, seed: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reading(tensors: Mapping[str, Tensor]) -> Callable[..., None]:
    def read(name: str, part: Tensor, place: tuple[int, ...]) -> None:
        box = tuple(slice(at, at + size) for at, size in zip(place, part.shape, strict=True))
        part.copy_(tensors[name][box])

    return read


def their_index(tensors: Mapping[str, Tensor], path: Path) -> object:
    save_file(tensors, path / FILE)
    return huggingface.find(path).index


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, tuple[Woven, Tensor]]]:
    """Tensors of theirs, and by kind the place of each of our stacks in them, and the stack."""
    blocks, scales = numbers(COUNT, 2 * OUT, IN // 32, 16, seed=0), numbers(COUNT, 2 * OUT, IN // 32, seed=1, high=250)
    whole = mxfp4.convert_moe_packed_tensors(blocks, scales)
    biases = torch.randn(COUNT, 2 * OUT)
    tensors = {"w": whole, "b": biases, "w_blocks": blocks, "w_scales": scales}
    index = their_index(tensors, tmp_path_factory.mktemp("theirs"))
    found = {}
    for turn in range(2):
        matrices = whole[..., turn::2].mT
        found[f"plain {turn}"] = Woven(index, ("w",), turn, 2, True), matrices
        found[f"packed {turn}"] = Woven(index, ("w_blocks", "w_scales"), turn, 2, False), matrices
        found[f"biases {turn}"] = Woven(index, ("b",), turn, 2, False), biases[..., turn::2]
    return tensors, found


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("most", [1, 100, 1 << 24])
def test_any_box_is_that_of_the_whole(theirs: tuple, most: int, data: st.DataObject) -> None:
    tensors, places = theirs
    where, ours = places[data.draw(st.sampled_from(sorted(places)))]
    ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in ours.shape]
    box = tuple(slice(first, end) for first, end in ends)
    target = torch.empty_like(ours[box], dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.checkpoint.weights.woven.MAX_ELEMENTS", most)
        fill(reading(tensors), where, target, [first for first, _ in ends])
    assert torch.equal(target, ours[box].float())


def test_every_number_of_4_bits_with_every_scale_is_exact() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for scale in range(256):
        found = unpacked(every[:, None], torch.full((16, 1), scale, dtype=torch.uint8))
        if scale == 255:
            assert found.isnan().all()
            continue
        signs, sizes = (1, -1), (0, 0.5, 1, 1.5, 2, 3, 4, 6)
        table = [sign * size * 2.0 ** (scale - 127) for sign in signs for size in sizes]
        exact = [[table[bits] for byte in row for bits in (byte % 16, byte // 16)] for row in every.tolist()]
        assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).to(torch.bfloat16))
        if scale < 254:  # beyond, a power of two is too large for transformers' product, though not for the result
            given = every.view(1, 16, 1, 16), torch.full((1, 16, 1), scale, dtype=torch.uint8)
            assert torch.equal(found, mxfp4.convert_moe_packed_tensors(*given)[0].T)


def folders(path: Path) -> Mapping[str, Path]:
    """The same weights, packed and in bf16."""
    PACKED.save(path / "bf16", torch.bfloat16, shard="1GB")
    tensors = load_file(path / "bf16" / FILE)
    packed = dict(tensors)
    for seed, name in enumerate([name for name in tensors if name.endswith(MATRICES)]):
        count, inside, out = tensors[name].shape
        blocks = numbers(count, out, inside // 32, 16, seed=seed)
        scales = numbers(count, out, inside // 32, seed=seed, low=120, high=126)
        tensors[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    (path / "packed").mkdir()
    config = json.loads((path / "bf16" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "packed" / "config.json").write_text(json.dumps(config))
    for name, each in (("bf16", tensors), ("packed", packed)):
        save_file(each, path / name / FILE, {"format": "pt"})
    return {name: path / name for name in ("bf16", "packed")}


def test_blocks_of_4_bits_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """And written as bf16, to the byte, by way of a checkpoint too; config.json tells of no blocks then."""
    paths = folders(tmp_path)
    found = open_weights(str(paths["packed"]))
    assert (found.dtype, found.model) == ("bfloat16", open_weights(str(paths["bf16"])).model)
    convert(found, huggingface.plan(found, None, None), tmp_path / "once", {})
    convert(found, dcp.plan(found, tmp_path / "ours", None, 2), tmp_path / "ours", {})
    ours = open_weights(str(tmp_path / "ours"))
    convert(ours, huggingface.plan(ours, None, None), tmp_path / "twice", {})
    for name in ("once", "twice"):
        assert (tmp_path / name / FILE).read_bytes() == (paths["bf16"] / FILE).read_bytes()
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())


def test_what_transformers_saved_goes_round_to_the_byte(tmp_path: Path) -> None:
    Case("GptOss", GPT_OSS).save(tmp_path / "theirs")
    found = open_weights(str(tmp_path / "theirs"))
    convert(found, dcp.plan(found, tmp_path / "ours", None, 2), tmp_path / "ours", {})
    ours = open_weights(str(tmp_path / "ours"))
    convert(ours, huggingface.plan(ours, None, None), tmp_path / "back", {})
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert len(names) > 4
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "lacks model.layers.0.mlp.experts.down_proj_scales"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, :-1].contiguous()}),
            r"down_proj_scales uint8 \[5, 31, 2\] instead of \[5, 32, 2\]",
        ),
        (
            lambda tensors, name: tensors.update({f"{name}_blocks": tensors[f"{name}_blocks"].view(torch.int8)}),
            "down_proj_blocks int8",
        ),
    ],
)
def test_blocks_that_do_not_belong_to_the_model_are_refused(
    change: Callable[[dict[str, Tensor], str], object], told: str, tmp_path: Path
) -> None:
    path = folders(tmp_path)["packed"]
    tensors = load_file(path / FILE)
    change(tensors, "model.layers.0.mlp.experts.down_proj")
    save_file(tensors, path / FILE, {"format": "pt"})
    with pytest.raises(DamagedError, match=told):
        open_weights(str(path))


def test_a_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    path = folders(tmp_path)["packed"]
    found = open_weights(str(path))
    whole = {f"model.{name}": torch.empty(weight.shape) for name, weight in weights(found.model).items()}
    reader_of(found).fill(whole)
    name = "model.layers.1.mlp.experts.up.weight"
    part = torch.empty(2, *whole[name].shape[1:])
    reader_of(found).fill_parts([(name, part, (3, 0, 0))])
    assert torch.equal(part, whole[name][3:])
