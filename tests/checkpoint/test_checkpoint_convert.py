"""Conversion is whole or not there, goes on where it was stopped, and holds little in memory."""

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES, EXPERTS, GROUPED, LATENT, Case
from tampering import tamper

from megalite.base.errors import InputError
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.manifest import INDEX
from megalite.checkpoint.weights import convert as engine
from megalite.checkpoint.weights import reader as file_reader
from megalite.checkpoint.weights.convert import convert
from megalite.checkpoint.weights.formats import dcp, huggingface
from megalite.checkpoint.weights.formats.opened import Weights
from megalite.checkpoint.weights.maps.families import FAMILIES
from megalite.checkpoint.weights.maps.strips import Theirs, part
from megalite.checkpoint.weights.read import reader_of
from megalite.checkpoint.weights.sources import open_weights
from megalite.checkpoint.weights.targets import Wanted, plan_of
from megalite.plan.model.weights import weights

INDEX_FILE = "model.safetensors.index.json"
dcp_library = pytest.importorskip("torch.distributed.checkpoint")


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.fixture
def found(tmp_path: Path) -> Weights:
    CASES["qwen3"].save(tmp_path / "hf", torch.bfloat16)
    return open_weights(str(tmp_path / "hf"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("files", [1, 3])
def test_there_and_back_gives_the_same_files_to_the_byte(name: str, files: int, tmp_path: Path) -> None:
    CASES[name].save(tmp_path / "hf", torch.bfloat16, shard="9KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    there = open_weights(str(tmp_path / "hf"))
    convert(there, dcp.plan(there, tmp_path / "ours", None, files), tmp_path / "ours", {}, workers=files)
    ours = open_weights(str(tmp_path / "ours"))
    convert(ours, huggingface.plan(ours, None, None), tmp_path / "back", {}, workers=2)
    assert same_files(tmp_path / "hf", tmp_path / "back")


MANY_HEADS = {"num_key_value_heads": 4}
SOME_LAYERS = {"decoder_sparse_step": 2, "head_dim": 8, "moe_intermediate_size": 20}
BY_WAY_OF_MEGATRON = {
    "llama tied, all heads": CASES["llama tied, all heads"],
    "qwen2, all heads": Case("Qwen2", MANY_HEADS),
    "mixtral": Case("Mixtral", EXPERTS | MANY_HEADS),
    "deepseek_v3": Case("DeepseekV3", LATENT | GROUPED | {"first_k_dense_replace": 1, "num_experts_per_tok": 4}),
    "qwen3_moe, some layers": Case("Qwen3Moe", EXPERTS | MANY_HEADS | SOME_LAYERS),
}
SPLITS = [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)]  # tensor-parallel, pipeline-parallel, virtual stages


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", BY_WAY_OF_MEGATRON)
def test_by_way_of_megatron_files_come_back_to_the_byte(
    kind: str, split: tuple[int, int, int], name: str, tmp_path: Path
) -> None:
    corrected = name == "deepseek_v3"  # transformers saves corrections in one type with all else, Megatron in float32
    BY_WAY_OF_MEGATRON[name].save(tmp_path / "hf", torch.float32 if corrected else torch.bfloat16, shard="9KB")
    there = open_weights(str(tmp_path / "hf"))
    tp, pp, virtual = split
    plan = plan_of(kind, there, tmp_path / "theirs", Wanted(tp=tp, pp=pp, virtual=virtual))
    convert(there, plan, tmp_path / "theirs", {}, workers=2)
    theirs = open_weights(str(tmp_path / "theirs"))
    assert theirs.kind == kind
    convert(theirs, huggingface.plan(theirs, None, None), tmp_path / "back", {})
    assert same_files(tmp_path / "hf", tmp_path / "back")


def test_torch_reads_our_checkpoint(found: Weights, tmp_path: Path) -> None:
    convert(found, dcp.plan(found, tmp_path / "ours", "float32", 2), tmp_path / "ours", {})
    tensors = {f"model.{name}": torch.empty(weight.shape) for name, weight in weights(found.model).items()}
    expected = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    reader_of(found).fill(expected)
    dcp_library.load(tensors, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("size", [1_000, 9_000, 20_000, 10**9])
def test_files_are_divided_as_transformers_divides_them(size: int, tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path / "hf", shard=f"{size // 1000}KB")
    found = replace(open_weights(str(tmp_path / "hf")), companions=())
    convert(found, huggingface.plan(found, None, size), tmp_path / "ours", {})
    ours, theirs = ({path.name: path for path in (tmp_path / each).glob("model*")} for each in ("ours", "hf"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].read_bytes() == theirs[name].read_bytes() for name in ours)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_another_data_type_is_told_in_the_config(dtype: str, found: Weights, tmp_path: Path) -> None:
    convert(found, huggingface.plan(found, dtype, None), tmp_path / "out", {})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert {tensor.dtype for tensor in open_weights(str(tmp_path / "out")).index.tensors.values()} == {dtype}


def test_what_is_there_stays(found: Weights, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is there already, and is not overwritten"):
        convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match="is there already"):
        convert(found, huggingface.plan(found, None, None), tmp_path / "link", {})


class Crash(Exception):
    pass


@pytest.mark.parametrize(
    "changed", ["nothing", "source", "config", "request", "a whole file", "the journal", "all of the journal"]
)
def test_it_goes_on_where_it_was_stopped(
    changed: str, found: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files stay unless something has changed: then all is written anew, and the result is the same."""
    out, hidden = tmp_path / "out", tmp_path / ".out.converting"
    plan = huggingface.plan(found, None, None)
    assert len(plan.outputs) > 3
    written: list[str] = []
    write = engine._write

    def counted(hidden: Path, output: Any, *rest: Any) -> Any:
        if len(written) == 3:
            raise Crash
        written.append(output.name)
        return write(hidden, output, *rest)

    monkeypatch.setattr(engine, "_write", counted)
    with pytest.raises(Crash):
        convert(found, plan, out, {"a": 1})
    assert not out.exists()
    first = list(written)
    if changed == "source":
        os.utime(tmp_path / "hf" / first[0], (1, 1))
    elif changed == "config":  # it decides which rows go where
        fields = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**fields, "rope_theta": 7.0}))
        found = open_weights(str(tmp_path / "hf"))
    elif changed == "a whole file":
        (hidden / first[1]).write_bytes(b"x" * (hidden / first[1]).stat().st_size)
    elif changed == "the journal":
        (hidden / engine.JOURNAL).write_bytes((hidden / engine.JOURNAL).read_bytes()[:-20])
    elif changed == "all of the journal":
        (hidden / engine.JOURNAL).write_bytes(b"")
    (hidden / "stray").write_text("of something else")
    written[:] = [""] * 4  # no more crashes
    told: list[int] = []
    done = convert(found, plan, out, {"a": 2 if changed == "request" else 1}, 1, told.append)
    kept = set(first) - set(written)
    expected = {
        "nothing": set(first),
        "source": set(),
        "config": set(),
        "request": set(),
        "a whole file": {first[0]},  # the journal is trusted up to the first file that is not as it says
        "the journal": set(first[:2]),
        "all of the journal": set(),
    }
    assert kept == expected[changed] == {name for name, each in done.items() if each.earlier}
    assert told[0] == sum(output.bytes for output in plan.outputs if output.name in kept)
    assert sum(told) == sum(output.bytes for output in plan.outputs)
    assert same_files(out, tmp_path / "hf")
    assert not hidden.exists()


def test_what_is_in_the_way_is_named(found: Weights, tmp_path: Path) -> None:
    (tmp_path / ".out.converting").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"\.out\.converting: is in the way; remove it"):
        convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})


def test_a_full_disk_is_one_message_and_work_goes_on(
    found: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(engine.HashedFile, "finish", lambda _: (_ for _ in ()).throw(full))
        with pytest.raises(InputError, match="No space left on device; when that is fixed, the same command goes on"):
            convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
    convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})


def test_what_fp16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = CASES["llama"].make()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "hf")
    found = open_weights(str(tmp_path / "hf"))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up\.weight: has values that fp16 cannot hold"):
        convert(found, huggingface.plan(found, "float16", None), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_what_is_not_finite_is_named_also_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES["llama"].make()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
        model.model.norm.weight[0] = float("-inf")
    model.save_pretrained(tmp_path / "hf")
    found = open_weights(str(tmp_path / "hf"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_publish", lambda *_: (_ for _ in ()).throw(InputError("stopped")))
        with pytest.raises(InputError, match="stopped"):
            convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
    written = convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
    names = {name for each in written.values() for name in each.poisoned}
    assert names == {"model.layers.1.mlp.up.weight", "model.head.norm.weight"}


LINKS = {
    "a file beside": ("tokenizer.json", "other", True),
    "of a hub": ("tokenizer.json", "../../blobs/0123", True),
    "elsewhere": ("tokenizer.json", "../../secret", False),
    "elsewhere, without an end of its name": ("LICENSE", "{tmp}/secret", False),
    "out of a hub": ("tokenizer_config.json", "../../blobs/../secret", False),
}


@pytest.mark.parametrize("link", LINKS)
def test_only_links_of_a_folder_and_of_a_hub_are_copied(link: str, tmp_path: Path) -> None:
    name, target, copied = LINKS[link]
    folder = tmp_path / "models--a--b/snapshots/1"
    CASES["llama"].save(folder, torch.bfloat16)
    (tmp_path / "models--a--b/blobs").mkdir()
    for path in (folder / "other", tmp_path / "models--a--b/blobs/0123", tmp_path / "secret", folder / "../../secret"):
        path.write_text("{}")
    (folder / name).symlink_to(target.format(tmp=tmp_path))
    found = open_weights(str(folder))
    if copied:
        convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
        assert (tmp_path / "out" / name).read_text() == "{}"
        return
    with pytest.raises(InputError, match=f"{name}: leads to .*secret, outside of its folder, and is not copied"):
        convert(found, huggingface.plan(found, None, None), tmp_path / "out", {})
    assert not list(tmp_path.glob("*out*"))


def test_an_index_that_names_a_file_which_the_manifest_does_not_is_damage(found: Weights, tmp_path: Path) -> None:
    convert(found, dcp.plan(found, tmp_path / "out", None, 1), tmp_path / "out", {})
    index = Index.decode((tmp_path / "out" / INDEX).read_bytes())
    (tmp_path / "out" / INDEX).write_bytes(Index((*index.files, "strange.distcp"), index.tensors).encode())
    tamper(tmp_path / "out")
    with pytest.raises(DamagedError, match=r"names 'strange.distcp', a file that .* does not list"):
        open_weights(str(tmp_path / "out"))


def test_an_index_of_another_data_type_tells_its_bytes(tmp_path: Path) -> None:
    CASES["llama"].save(tmp_path / "hf", torch.bfloat16, shard="9KB")
    found = open_weights(str(tmp_path / "hf"))
    convert(found, huggingface.plan(found, "float32", None), tmp_path / "out", {})
    before, after = (json.loads((tmp_path / each / INDEX_FILE).read_text()) for each in ("hf", "out"))
    assert after["metadata"]["total_size"] == 2 * before["metadata"]["total_size"]
    assert after["weight_map"] == before["weight_map"]


def test_two_at_once_do_not_disturb_each_other(found: Weights, tmp_path: Path) -> None:
    plan = huggingface.plan(found, None, None)
    with (
        engine._owned(tmp_path / ".out.converting"),
        pytest.raises(InputError, match="another process is writing there"),
    ):
        convert(found, plan, tmp_path / "out", {})
    convert(found, plan, tmp_path / "out", {})


def test_an_error_of_a_file_leaves_no_target(found: Weights, tmp_path: Path) -> None:
    broken = max((tmp_path / "hf").glob("*.safetensors"))
    plan = huggingface.plan(found, None, None)
    broken.write_bytes(broken.read_bytes()[:-10])
    with pytest.raises(InputError, match=f"{broken.name}.* ends early"):
        convert(found, plan, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_has_decayed_is_refused(found: Weights, tmp_path: Path) -> None:
    convert(found, dcp.plan(found, tmp_path / "ours", None, 1), tmp_path / "ours", {})
    file = next((tmp_path / "ours").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    ours = open_weights(str(tmp_path / "ours"))
    with pytest.raises(InputError, match="does not have the hash it was written with"):
        convert(ours, huggingface.plan(ours, None, None), tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_blocks_bound_the_memory_and_padding_repeats_the_last_row(
    found: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of a tensor, a block has at most BLOCK bytes."""
    reader, weight = reader_of(found), weights(found.model)["embed.weight"]
    whole = torch.empty(weight.shape)
    reader.fill({"model.embed.weight": whole})
    strips = tuple(part("embed.weight", weight, (first, first + 7), (3, 20)) for first in (40, 9))
    theirs = Theirs((20, 17), strips)
    expected = torch.cat([whole[40:47, 3:20], whole[9:16, 3:20], whole[15:16, 3:20].expand(6, -1)])
    for size in (1, 200, 1 << 20):
        monkeypatch.setattr(engine, "BLOCK", size)
        found_blocks = list(engine.blocks(reader, theirs, "float32"))
        assert torch.equal(torch.cat(found_blocks).view(20, 17), expected)
        assert max(block.numel() for block in found_blocks) <= max(17, size // 4)


def test_no_byte_of_a_stack_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are smaller than the matrix of an expert, which lies alone in their files, and in ours with the others."""
    Case("Mixtral", EXPERTS | {"intermediate_size": 100}).save(tmp_path / "hf")
    found = open_weights(str(tmp_path / "hf"))
    convert(found, dcp.plan(found, tmp_path / "ours", None, 1), tmp_path / "ours", {})
    counted: list[int] = []
    work = file_reader.read_at

    def counting(path: Path, name: str, descriptor: int, target: memoryview, position: int) -> None:
        counted.append(len(target))
        work(path, name, descriptor, target, position)

    monkeypatch.setattr(file_reader, "read_at", counting)
    monkeypatch.setattr(engine, "BLOCK", 4000)
    for folder in ("hf", "ours"):
        reader = reader_of(open_weights(str(tmp_path / folder)))
        for theirs in FAMILIES["mixtral"].table(found.model).values():
            counted.clear()
            assert sum(block.nbytes for block in engine.blocks(reader, theirs, "float32")) == sum(counted)


def test_kills_lose_nothing(tmp_path: Path) -> None:
    """Killed again and again, each time somewhat later, it is done in the end, and the target is never half there."""
    Case("Llama", {"hidden_size": 128, "intermediate_size": 256}).save(tmp_path / "hf", shard="150KB")
    out = tmp_path / "out"
    found = open_weights(str(tmp_path / "hf"))
    kills = 0
    while not out.exists():
        child = os.fork()  # a process of its own would import PyTorch for seconds each time
        if child == 0:
            convert(found, huggingface.plan(found, None, None), out, {}, 2)
            os._exit(0)
        time.sleep(0.002 * kills)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        assert kills < 1000
    assert kills > 1
    assert same_files(out, tmp_path / "hf")
