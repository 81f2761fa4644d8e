"""`megalite-convert` as people run it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import CASES
from megatron_files import SMALL, random_weights, read, same, write_dist
from toy_jobs import config_of, one_rank, train_and_save

from megalite.checkpoint.weights.sources import open_weights, read_model
from megalite.config.layout import Layout
from megalite.config.load import dump_model
from megalite.config.model_schema import Experts
from megalite.model.decoder import Decoder
from megalite.plan.model.weights import weights
from megalite_tools.checkpoint import compare_weights, convert
from megalite_tools.checkpoint.compare_weights import difference_of_logits
from megalite_tools.checkpoint.convert import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASES["phi3"].save(tmp_path / "hf", torch.bfloat16)
    return tmp_path


def test_there_and_back_with_a_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", f"{folder}/hf", "--to", f"megalite:{folder}/ours", "--check"]) == 0
    assert main(["--from", f"{folder}/ours", "--to", f"hf:{folder}/back", "--check", "--json", "-"]) == 0
    lines, text = capsys.readouterr().out.split("{", 1)
    assert "39 of 39 tensors are the same to the bit" in lines
    report = json.loads("{" + text)
    assert report["check"] == {"tensors": 39, "unequal": [], "logits": 0.0}
    assert report["files"].keys() == {path.name for path in (folder / "hf").glob("*.safetensors")}
    for path in (folder / "hf").iterdir():
        assert path.read_bytes() == (folder / "back" / path.name).read_bytes()


def test_a_check_finds_what_differs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a tensor had been written wrongly."""
    work = convert.convert

    def faulty(*args: Any, **kwargs: Any) -> Any:
        written = work(*args, **kwargs)
        file = max((folder / "out").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return written

    monkeypatch.setattr(convert, "convert", faulty)
    assert main(["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", "--check"]) == 1
    assert "38 of 39 tensors are the same to the bit; not " in capsys.readouterr().out


def test_weights_that_are_not_finite_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = CASES["phi3"].make()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(tmp_path / "hf")
    assert main(["--from", f"{tmp_path}/hf", "--to", f"hf:{tmp_path}/out", "--json", f"{tmp_path}/told.json"]) == 0
    assert f"warning: {tmp_path}/hf: NaN or infinity is in model.head.norm.weight; " in capsys.readouterr().err
    assert json.loads((tmp_path / "told.json").read_text())["not_finite"] == ["model.head.norm.weight"]


def test_states_of_the_optimizer_are_taken_along_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_rank():
        config = config_of(Layout())
        config.train.precision = "fp32"
        train_and_save(config, tmp_path, 2)
    to = ["--to", f"megatron-dist:{tmp_path}/theirs", "--dtype", "bf16", "--optimizer", "--check"]
    assert main(["--from", f"{tmp_path}/step-00000002", *to]) == 0
    assert "108 of 108 tensors are the same to the bit" in capsys.readouterr().out
    assert main(["--from", f"{tmp_path}/theirs", "--to", f"megalite:{tmp_path}/back", "--optimizer", "--check"]) == 0
    assert "81 of 81 tensors are the same to the bit" in capsys.readouterr().out
    assert main(["--from", f"{tmp_path}/theirs", "--to", f"megalite:{tmp_path}/weights"]) == 0
    assert "left out: the optimizer's states and the run's progress; --optimizer" in capsys.readouterr().out
    assert main(["--from", f"{tmp_path}/theirs", "--to", f"hf:{tmp_path}/hf", "--optimizer"]) == 2
    assert "has no place for an optimizer's states; leave --optimizer out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist"])
def test_corrections_of_routers_stay_in_float32(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = replace(SMALL, experts=Experts(4, width=16, scores="sigmoid", correction_rate=0.01, shared_width=16))
    write_dist(tmp_path / "theirs", model, random_weights(model, torch.bfloat16))
    assert main(["--from", f"{tmp_path}/theirs", "--to", f"{kind}:{tmp_path}/out", "--tp", "2", "--check"]) == 0
    way = ["--from", f"{tmp_path}/out", "--to", f"megalite:{tmp_path}/ours", "--dtype", "bf16", "--check"]
    assert main(way) == 0
    assert capsys.readouterr().out.count("59 of 59 tensors are the same to the bit") == 2
    found = read(open_weights(f"{tmp_path}/ours"))
    assert same(found, random_weights(model, torch.bfloat16))


def test_another_data_type_is_checked_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", "--dtype", "fp16", "--check"]) == 0
    assert "39 of 39 tensors are the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--to", "hf:{0}/hf"], "/hf: is there already, and is not overwritten"),
        (["--to", "{0}/out"], "say the kind, as in hf:"),
        (["--to", "hf:"], "names no folder"),
        (["--to", "hf:{0}/none/out"], "there is no folder {0}/none; make it first"),
        (
            ["--to", "hf:{0}/out", "--tp", "2"],
            "--tp 2: has no meaning for hf, only for megatron, megatron-dist or meta",
        ),
        (["--to", "megalite:{0}/out", "--shard-size", "1MB"], "has no meaning for megalite, only for hf"),
        (["--to", "hf:{0}/out", "--tokens", "1,2"], "--tokens: needs --check"),
        (["--to", "hf:{0}/out", "--json", "{0}"], "is a folder; name a file in it"),
        (["--from", "{0}/nowhere", "--to", "hf:{0}/out"], "{0}/nowhere: there is no such folder"),
        (["--from", "{0}", "--to", "hf:{0}/out"], "holds no weights of a known kind; say which as KIND:PATH"),
        (["--from", "megalite:{0}/hf", "--to", "hf:{0}/out"], "holds no checkpoint"),
        (["--from", "hf:{0}", "--to", "hf:{0}/out"], "config.json: is missing"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(folder) for argument in arguments]
    assert main([*([] if "--from" in given else ["--from", f"{folder}/hf"]), *given]) == 2
    error = capsys.readouterr().err
    assert told.format(folder) in error
    assert error.count("\n") == 1
    assert not (folder / "out").exists()
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("size", ["0", "-1", "5XB", "", "1e9", "9" * 30])
def test_a_size_that_is_none_is_refused(size: str, folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", f"--shard-size={size}"])
    assert ended.value.code == 2


def test_it_needs_neither_transformers_nor_safetensors(folder: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('transformers', 'safetensors', 'tokenizers', 'huggingface_hub'): sys.modules[name] = None\n"
        "from megalite_tools.checkpoint.convert import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", "--check"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_formats_of_one_data_type_ask_which(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = CASES["llama"].make(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(folder / "mixed")
    for kind in ("megatron", "megatron-dist", "meta"):
        assert main(["--from", f"{folder}/mixed", "--to", f"{kind}:{folder}/out"]) == 2
        assert f"has tensors of bfloat16 and float32, but {kind} has one data type" in capsys.readouterr().err
    assert main(["--from", f"{folder}/mixed", "--to", f"meta:{folder}/out", "--dtype", "fp32", "--check"]) == 0


@pytest.mark.parametrize("kind", ["megatron", "megatron-dist", "meta"])
def test_by_way_of_any_kind_files_come_back_to_the_byte(kind: str, folder: Path) -> None:
    CASES["llama"].save(folder / "llama", torch.bfloat16, shard="9KB")
    assert main(["--from", f"{folder}/llama", "--to", f"{kind}:{folder}/there", "--tp", "2", "--check"]) == 0
    assert main(["--from", f"{folder}/there", "--to", f"hf:{folder}/back", "--check"]) == 0
    names = {path.name for path in (folder / "llama").iterdir()}
    assert names == {path.name for path in (folder / "back").iterdir()}
    assert all((folder / "llama" / name).read_bytes() == (folder / "back" / name).read_bytes() for name in names)


def test_logits_of_given_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", "--check", "--tokens"]
    assert main([*given, "3,1,4"]) == 0
    assert "logits of these tokens differ by 0 of the largest" in capsys.readouterr().out
    shutil.rmtree(folder / "out")
    assert main([*given, "64"]) == 2
    assert "--tokens 64, 1 of them: ids must be below 64" in capsys.readouterr().err


def test_the_rate_counts_what_this_attempt_wrote(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = convert.convert

    def resumed(*args: Any, **kwargs: Any) -> Any:
        """As if an earlier attempt had written all files but one."""
        written = work(*args, **kwargs)
        return {name: replace(each, earlier=name != min(written)) for name, each in written.items()}

    monkeypatch.setattr(convert, "convert", resumed)
    assert main(["--from", f"{folder}/hf", "--to", f"hf:{folder}/out", "--json", f"{folder}/report"]) == 0
    report = json.loads((folder / "report").read_text())
    now = report["files"][min(report["files"])]["bytes"]
    assert report["bytes_now"] == now < report["bytes"]
    found = re.search(r"files, (\S+) kB of them now, (\S+) s, (\S+) (k|M)B/s", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) * 1000 == pytest.approx(now, rel=0.01)
    assert float(found[3]) * {"k": 1e3, "M": 1e6}[found[4]] == pytest.approx(now / report["seconds"], rel=0.01)


def test_logits_are_compared_with_one_layer_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights too, which the first layer and the last have."""
    CASES["llama tied, all heads"].save(tmp_path / "hf")
    found, held = open_weights(f"hf:{tmp_path}/hf"), []

    class Counted(Decoder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            held.append(sum(parameter.numel() for parameter in self.parameters()))

    monkeypatch.setattr(compare_weights, "Decoder", Counted)
    most = sum(weight.elements for weight in weights(replace(found.model, layers=1)).values())
    monkeypatch.setattr(compare_weights, "host_memory", lambda: 12 * most)
    assert difference_of_logits(found, found) == 0
    assert len(held) == 2 * found.model.layers
    assert max(held) <= most
    monkeypatch.setattr(compare_weights, "host_memory", lambda: 12 * most - 1)
    assert difference_of_logits(found, found) is None


def test_a_model_can_be_given_for_files_that_do_not_tell_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CASES["llama"].save(folder / "llama")
    assert main(["--from", f"{folder}/llama", "--to", f"meta:{folder}/meta"]) == 0
    shutil.rmtree(folder / "meta/huggingface")
    (folder / "model.yaml").write_text(dump_model(read_model(f"hf:{folder}/llama")))
    back = ["--from", f"{folder}/meta", "--to", f"hf:{folder}/back", "--check", "--config", f"{folder}/model.yaml"]
    assert main(back) == 0
    assert read_model(f"hf:{folder}/back") == read_model(f"hf:{folder}/llama")
    assert main(["--from", f"{folder}/hf", "--to", f"hf:{folder}/x", "--config", f"{folder}/model.yaml"]) == 2
    assert "tells its model itself" in capsys.readouterr().err
