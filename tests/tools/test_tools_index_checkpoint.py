"""`megalite-inspect-checkpoint index`: what it makes loadable, and that it runs nothing it reads."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tampering import tamper
from toy_jobs import config_of, make, one_rank, save

from megalite.checkpoint.disk import DamagedError
from megalite.checkpoint.files import METADATA
from megalite.checkpoint.manifest import INDEX, MANIFEST, Manifest, OldFormatError, check_sizes
from megalite.config.layout import Layout
from megalite.config.load import dump
from megalite_tools.checkpoints import Checkpoint
from megalite_tools.dcp_index import dcp_index
from megalite_tools.inspect_checkpoint import main

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
    """What another program has saved: views, an empty tensor, and what is no tensor."""
    tensors = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.tensor(3, dtype=torch.int16), "c": torch.empty(0, 2)}
    tensors |= {"view": torch.arange(100)[10:30].reshape(4, 5), "d": torch.arange(6, dtype=torch.bfloat16)}
    dcp.save(
        {"model": tensors, "words": {"deep": ["x", 1]}, "count": 7}, checkpoint_id=tmp_path / "foreign", no_dist=True
    )
    return tmp_path / "foreign"


def test_a_folder_of_another_program(foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(foreign)]) == 2
    assert "has no manifest.json; give the configuration of its model with --config" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(dump(config_of(Layout())))
    assert main(["index", str(foreign), "--config", str(tmp_path / "c.yaml")]) == 0
    out = capsys.readouterr().out
    assert "has an index now; left out, as no tensors: " in out
    assert "'count'" in out
    found = Checkpoint(foreign)
    assert set(found.tensors) == {"model.a", "model.b", "model.c", "model.view", "model.d"}
    assert found.read("model.a").equal(torch.arange(24.0).reshape(4, 6))
    assert found.read("model.view").equal(torch.arange(100)[10:30].reshape(4, 5))
    assert found.read("model.d").equal(torch.arange(6, dtype=torch.bfloat16))
    assert (found.read("model.b").item(), found.read("model.c").shape) == (3, (0, 2))
    assert main(["verify", str(foreign)]) == 0


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
