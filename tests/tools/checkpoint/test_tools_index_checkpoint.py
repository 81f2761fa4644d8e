"""`megalite-inspect-checkpoint index`: what it makes loadable, and that it runs nothing it reads."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tampering import DATA, tamper
from toy_jobs import MODEL, config_of, make, one_rank, save

from megalite.base.errors import InputError
from megalite.checkpoint.run.same_run import refuse_other_data
from megalite.checkpoint.run.tensors import Checkpoint
from megalite.checkpoint.store.disk import DamagedError
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.index import Index
from megalite.checkpoint.store.manifest import INDEX, MANIFEST, Manifest, OldFormatError, check_sizes
from megalite.checkpoint.weights.formats.dcp_index import dcp_index
from megalite.config.layout import Layout
from megalite.config.load import dump
from megalite.plan.model.weights import weights
from megalite_tools.checkpoint.inspect_checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with one_rank():
        return save(make(config_of(Layout())), tmp_path_factory.mktemp("run") / "checkpoints", 1)


def without_index(path: Path) -> Path:
    """As format 1 was."""
    (path / INDEX).unlink()
    tamper(path, lambda fields: fields.update(format=1), drop=[INDEX])
    return path


@pytest.fixture
def old(original: Path, tmp_path: Path) -> Path:
    return without_index(Path(shutil.copytree(original.parent, tmp_path / "checkpoints")) / original.name)


def test_format_1_is_refused_with_the_command_that_helps(old: Path) -> None:
    with pytest.raises(OldFormatError, match=rf"has format 1; .*`megalite-inspect-checkpoint index {old}`"):
        check_sizes(old)


def test_format_1_becomes_what_it_would_be_today(old: Path, original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(old.parent)]) == 0
    assert capsys.readouterr().out == f"{old}: has an index now\n"
    a, b = Checkpoint(old), Checkpoint(original)
    assert set(a.tensors) == set(b.tensors)
    for name, stored in b.tensors.items():
        assert (a.tensors[name].dtype, a.tensors[name].shape) == (stored.dtype, stored.shape)
        assert a.read(name).equal(b.read(name))
    assert Manifest.read(old).files.keys() == Manifest.read(original).files.keys()
    assert main(["verify", str(old)]) == 0
    before = (old / MANIFEST).read_bytes()
    assert main(["index", str(old)]) == 0
    assert "has an index\n" in capsys.readouterr().out
    assert (old / MANIFEST).read_bytes() == before


def test_damage_is_not_made_good(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((old / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (old / "__0_0.distcp").write_bytes(data)
    assert main(["index", str(old)]) == 2
    assert "__0_0.distcp does not have the hash" in capsys.readouterr().err
    assert not (old / INDEX).exists()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """What another program has saved: a model, a view, an empty tensor, and what is no tensor."""
    model = {name: torch.randn(weight.shape, dtype=torch.bfloat16) for name, weight in weights(MODEL).items()}
    others = {"b": torch.tensor(3, dtype=torch.int16), "c": torch.empty(0, 2), "view": torch.arange(9)[2:8].view(2, 3)}
    state = {"model": model, "other": others, "words": {"deep": ["x", 1]}, "count": 7}
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    return tmp_path / "foreign"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(dump(config_of(Layout())))
    return tmp_path / "c.yaml"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that `index` says."""
    assert main(["index", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_of_another_program(foreign: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no manifest.json; give the configuration of its model with --config" in refused(capsys, foreign)
    saved = (foreign / METADATA).stat().st_mtime
    assert main(["index", str(foreign), "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "has an index now; left out, as no tensors: " in out
    assert "'count'" in out
    found = Checkpoint(foreign)
    assert {name for name in found.tensors if name.startswith("other.")} == {"other.b", "other.c", "other.view"}
    assert found.read("other.view").equal(torch.arange(9)[2:8].view(2, 3))
    assert (found.read("other.b").item(), found.read("other.c").shape) == (3, (0, 2))
    there = {"model.embed.weight": torch.empty(32, 16, dtype=torch.bfloat16)}
    dcp.load(there, checkpoint_id=foreign, no_dist=True)
    assert found.read("model.embed.weight").equal(there["model.embed.weight"])
    manifest = found.manifest
    assert (manifest.tokens, manifest.ranks, manifest.layout, manifest.versions) == (None, None, None, {})
    assert abs(datetime.fromisoformat(manifest.saved).timestamp() - saved) <= 1
    assert found.progress() is None
    assert main(["verify", str(foreign)]) == 0
    assert main(["show", str(foreign)]) == 0
    assert "another program; there is no progress of a run" in capsys.readouterr().out
    assert main(["show", str(foreign), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["progress"], told["learning_rate"], told["layout"]) == (None, None, None)
    assert main(["diff", str(foreign), str(foreign)]) == 0
    named = foreign.rename(foreign.with_name("step-00000000"))
    assert main(["list", str(named.parent)]) == 0
    with pytest.raises(InputError, match=f"without the state of a run; .*checkpoint.weights={named}"):
        refuse_other_data(named, manifest, config_of(Layout()), ())


def test_another_configuration_can_be_given(
    foreign: Path, config: Path, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", str(foreign), "--config", str(config)]) == 0
    before = Manifest.read(foreign)
    assert main(["index", str(foreign), "--config", str(config)]) == 0
    assert capsys.readouterr().out.endswith("has an index\n")
    config.write_text(dump(config_of(Layout(), replace(MODEL, sequence_length=16))))
    assert main(["index", str(foreign), "--config", str(config)]) == 0
    assert capsys.readouterr().out.endswith("has this configuration now\n")
    again = Manifest.read(foreign)
    assert again == replace(before, config=again.config)
    assert again.configuration.model.sequence_length == 16
    config.write_text(dump(config_of(Layout(), replace(MODEL, ffn=25))))
    told = refused(capsys, foreign, "--config", config)
    assert f"--config: {foreign} does not hold this model: model.layers.0.mlp.gate.weight bfloat16 [24, 16]" in told
    assert Manifest.read(foreign) == again
    for ours in (old, old.parent):  # format 1, and then format 2
        assert "with a configuration of its own; leave --config out" in refused(capsys, ours, "--config", config)
        assert main(["index", str(old)]) == 0


WRONG_MODELS = {
    "fewer layers": (replace(MODEL, layers=1), "model.layers.1.attention.q.weight is no weight of it"),
    "more layers": (replace(MODEL, layers=3), "model.layers.2.attention.q.weight missing instead of"),
    "a tied head": (replace(MODEL, tie_embeddings=True), "model.head.output.weight is no weight of it"),
    "heads that do not fit": (replace(MODEL, heads=7), "model.heads = 7: must"),
    "no layers": (replace(MODEL, layers=0), "model.layers = 0: must be at least 1"),
}


@pytest.mark.parametrize("how", WRONG_MODELS)
def test_a_configuration_of_another_model_is_refused(
    how: str, foreign: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, told = WRONG_MODELS[how]
    config.write_text(dump(config_of(Layout(), model)))
    before = sorted(foreign.iterdir())
    assert main(["index", str(foreign), "--config", str(config)]) == 2
    assert told in capsys.readouterr().err
    assert sorted(foreign.iterdir()) == before


HOSTILE_TENSORS = {
    "40 dimensions": ({"t": torch.zeros([1] * 40)}, "has t of 40 dimensions; tensors have at most 4"),
    "5 dimensions": ({"t": torch.zeros([1] * 5)}, "has t of 5 dimensions; tensors have at most 4"),
    "a line break": ({"a\nb": torch.zeros(1)}, r"has a tensor named 'a\nb'; names have at most 1000 printable"),
    "a long name": ({"x" * 1001: torch.zeros(1)}, "names have at most 1000 printable characters"),
    "complex numbers": ({"t": torch.zeros(1, dtype=torch.complex64)}, "has t of 'complex64'; known are"),
}


@pytest.mark.parametrize("how", HOSTILE_TENSORS)
@pytest.mark.timeout(20)
def test_what_an_index_cannot_hold_is_refused(
    how: str, tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, told = HOSTILE_TENSORS[how]
    dcp.save(state, checkpoint_id=tmp_path / "foreign", no_dist=True)
    (tmp_path / "foreign/__0_0.distcp").unlink()  # before any file is opened
    assert told in refused(capsys, tmp_path / "foreign", "--config", config)


@pytest.mark.parametrize("name", [INDEX, MANIFEST, METADATA, INDEX.upper()])
def test_no_file_of_another_program_is_overwritten(
    name: str, foreign: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither as one of its tensors nor beside them."""
    saved = (foreign / METADATA).read_bytes()
    if name == INDEX:
        (foreign / INDEX).write_bytes(b"another's")
        told = refused(capsys, foreign, "--config", config)
        assert "has another program's index.bin, which is not overwritten; move it away" in told
        assert (foreign / INDEX).read_bytes() == b"another's"
        (foreign / INDEX).unlink()
    short = b"\x8c" + bytes([len(DATA)]) + DATA.encode()
    assert short in saved
    (foreign / METADATA).write_bytes(saved.replace(short, b"\x8c" + bytes([len(name)]) + name.encode()))
    with pytest.raises(DamagedError, match=f"in '{name}', which is no file of tensors"):
        dcp_index(foreign)


def test_what_an_interrupted_attempt_left_is_overwritten(foreign: Path, config: Path) -> None:
    (foreign / INDEX).write_bytes(Index((), {}).encode())
    assert main(["index", str(foreign), "--config", str(config)]) == 0
    assert "model.embed.weight" in Checkpoint(foreign).tensors


def test_another_order_of_elements_is_refused(tmp_path: Path) -> None:
    dcp.save({"t": torch.arange(6.0).reshape(2, 3).t()}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(DamagedError, match=r"__0_0\.distcp holds t in another order of elements"):
        dcp_index(tmp_path)


MODULE = "torch.distributed.checkpoint.metadata"
RUN = b"cposix\nsystem\n"  # opcode GLOBAL: a function by name
COMMAND = b"X\x10\x00\x00\x00touch executed \n\x85"  # and its arguments, a tuple


CRAFTED = {
    "a call": b"\x80\x02" + RUN + COMMAND + b"R.",
    "a call in a frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f" + RUN + COMMAND + b"R.",
    "a stacked name": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + COMMAND + b"R.",
    "a dotted name": b"\x80\x04\x8c\x25" + MODULE.encode() + b"\x8c\x11Metadata.__init__\x93" + COMMAND + b"R.",
    "an instance": b"\x80\x02(" + b"X\x0e\x00\x00\x00touch executed" + b"iposix\nsystem\n.",
    "an object": b"\x80\x02(" + RUN + b"X\x0e\x00\x00\x00touch executedo.",
    "a new object": b"\x80\x02" + RUN + COMMAND + b"\x81.",
    "a new object with keywords": b"\x80\x04" + RUN + COMMAND + b"}\x92.",
    "an extension": b"\x80\x02\x82\x01" + COMMAND + b"R.",
    "a persistent name": b"Pexecuted\n.",
    "attributes of a class": f"c{MODULE}\nTensorStorageMetadata\n}}X\x05\x00\x00\x00itemscbuiltins\nexec\nsb.".encode(),
    "slots of a class": f"c{MODULE}\nMetadata\nN}}X\x05\x00\x00\x00itemscbuiltins\nexec\ns\x86b.".encode("latin-1"),
    "attributes of a function": b"cposix\nsystem\n}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xsb.",
    "attributes twice": f"c{MODULE}\nMetadata\n)\x81}}b}}b.".encode("latin-1"),
    "attributes of a list": b"]}b.",
    "a call of what was called": b"\x80\x02" + RUN + COMMAND + b"R)R.",
    "a number of 2 GB": b"\x8b\xff\xff\xff\x7f.",
    "a number of 5000 digits": b"L" + b"9" * 5000 + b"L\n.",
    "a text of 2**63 bytes": b"\x8d" + b"\xff" * 7 + b"\x7f.",
    "bytes out of band": b"\x80\x05\x97.",
    "doubled a million times": b"\x80\x04)\x94" + b"h\x00h\x00\x86q\x00" * 100_000 + b".",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"]\x94h\x00a.",
    "a key that cannot be one": b"}]Ns.",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "two ends": b"}}.",
    "an empty stack": b"R.",
    "no such note": b"h\x07.",
    "no mark": b"t.",
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_pickle_runs_nothing(how: str, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(foreign.parent)
    (foreign / METADATA).write_bytes(CRAFTED[how])
    with pytest.raises(DamagedError, match=r"\.metadata"):
        dcp_index(foreign)
    assert not Path("executed").exists()
