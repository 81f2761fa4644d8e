"""What megalite comes with is found by name wherever a file is; a file that is there comes first."""

from pathlib import Path

import pytest

from megalite.base.errors import InputError
from megalite.commands import main
from megalite.config.load import is_set, load
from megalite.config.presets import CONFIGS, KINDS, presets
from megalite.cost.cluster import cluster_path, load_cluster
from megalite.experiment.read import read_experiment

CONFIG_ROOT = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_file_has_a_name_of_its_own() -> None:
    names = [name for kind in KINDS for name in presets(kind)]
    assert sorted(names) == sorted(path.stem for path in CONFIG_ROOT.rglob("*.yaml"))
    assert len(set(names)) == len(names)
    assert {path.name for path in CONFIG_ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(KINDS)


@pytest.mark.parametrize("name", presets(*CONFIGS))
def test_a_name_stands_for_its_file(name: str) -> None:
    assert load([name]) == load([str(presets(*CONFIGS)[name])])


def test_a_file_that_is_there_comes_first_and_a_folder_does_not(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert load(["tiny"]).model.layers == 4
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_text("model: {layers: 7}\n")
    assert load(["tiny"]).model.layers == 7
    (tmp_path / "l40s").write_text("gpu: {}\n")
    assert cluster_path("l40s") == Path("l40s")


def test_files_of_people_include_presets_by_name(tmp_path: Path) -> None:
    mine = tmp_path / "further" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("include: [llama3.2_1b, small]\nmodel: {layers: 3}\n")
    assert load([str(mine)]).model == load(["llama3.2_1b", "small"], ["model.layers=3"]).model
    (mine.parent / "small").write_text("run: {name: beside}\n")
    assert load([str(mine)]).run.name == "beside"
    assert is_set([str(mine)], "model.width")
    (tmp_path / "mine.yaml").write_text("include: llama3_9b\n")
    with pytest.raises(InputError, match=r"llama3_9b: is no file.* \(included by mine\.yaml\)$"):
        load(["mine.yaml"])


def test_experiments_and_their_bases_are_found_by_name(tmp_path: Path) -> None:
    assert read_experiment(Path("ladder")).kind == "ladder"
    (tmp_path / "mine.yaml").write_text("experiment: {name: mine, kind: sweep, base: tiny}\ngrid: {optim.lr: [1, 2]}\n")
    assert read_experiment(Path("mine.yaml")).base["model"]["layers"] == 4
    with pytest.raises(InputError, match=r"lader: is no file, and no experiment .*; did you mean ladder"):
        read_experiment(Path("lader"))


def test_clusters_are_found_by_name() -> None:
    assert load_cluster("h100").name == "h100_sxm"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("llama3_9b", "llama3_9b: is no file, and no model or run that megalite comes with; did you mean llama3_8b"),
        ("ladder", "ladder: is no file, and no model or run that megalite comes with"),
        ("configs/model/tiny.yaml", "No such file or directory; megalite comes with one that is called tiny, without"),
        ("model.layers", "`megalite list` shows all; an override is written model.layers=VALUE, without spaces"),
        ("hf", "hf: is no file, and no model or run that megalite comes with; `megalite list` shows all"),
    ],
)
@pytest.mark.parametrize("command", ["show", "plan", "verify", "train"])
def test_a_name_that_is_unknown_is_bad_input(
    command: str, given: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([command, given]) == 2
    assert told in capsys.readouterr().err
