"""Tokenizer files that would take all memory or time of who opens them."""

import base64
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizer_cases import piece_model

from megalite.base.errors import InputError
from megalite.data import trial
from megalite.data.growth import growth
from megalite.data.trial import open_tokenizer_file

tokenizers = pytest.importorskip("tokenizers")

LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1900}
BACK = {"Regex": "(x+x+)+y|(a+)+b|( +)+c|(.+.+)+z"}
WORDS = {"a": 0, "##a": 1, "[UNK]": 2}
GREEDY = {
    "memory": {"normalizer": LONGER},
    "backtracking": {"pre_tokenizer": {"type": "Split", "pattern": BACK, "behavior": "Isolated", "invert": False}},
    "long words": {
        "model": {
            "type": "WordPiece",
            "vocab": WORDS,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10**9,
        }
    },
}


@pytest.fixture(autouse=True)
def _new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_tried", set())


def written(folder: Path, **changed: Any) -> Path:
    path = folder / "tokenizer.json"
    plain = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str())
    path.write_text(json.dumps(plain | changed))
    return path


@pytest.mark.parametrize("greed", GREEDY)
def test_a_greedy_file_is_refused_with_its_limits(greed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MEMORY", 400 << 20)
    monkeypatch.setattr(trial, "SECONDS", 2)
    path = written(tmp_path, **GREEDY[greed])
    assert path.stat().st_size < 10_000
    with pytest.raises(
        InputError, match=r"tried on short texts with 400 MiB of memory and 2 s of a processor, "
    ) as told:
        open_tokenizer_file(path)
    assert str(told.value).startswith(f"{path}: ")


def sequence(*steps: Mapping[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def replace(pattern: str, put: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": put}


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": sequence(*[replace("Z", "ZZ")] * 40)},
        {"normalizer": sequence(sequence(*[replace("é", "éé")] * 20), *[replace("é", "éé")] * 20)},
        {"normalizer": sequence(*[replace("[X-Z]", "ZZ", "Regex")] * 40)},
        {"normalizer": sequence(*[replace("(?=Q)", "Q", "Regex")] * 40)},
        {"normalizer": sequence(*[replace(r"\p{Lu}+", "ZZ", "Regex")] * 40)},  # Python knows no \p
        {"decoder": sequence(*[replace("ab", "abab")] * 40, key="decoders")},
    ],
)
def test_steps_that_each_make_a_text_longer_are_refused_whatever_they_look_for(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=r"tokenizer\.json: its normalizers or decoders may make a text .* times as long"
    ):
        open_tokenizer_file(written(tmp_path, **changed))


def test_normalizers_of_well_known_tokenizers_are_allowed(tmp_path: Path) -> None:
    model = ModelProto.FromString(piece_model("unigram", normalization_rule_name="nmt_nfkc"))
    charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    assert growth(json.dumps({"normalizer": precompiled}).encode()) == 18  # of U+FDFA, as in Unicode's NFKC
    kinds = [{"type": kind} for kind in ("NFKD", "StripAccents", "Lowercase")]
    albert = sequence(replace("``", '"'), replace("''", '"'), *kinds, precompiled, replace(" {2,}", " ", "Regex"))
    open_tokenizer_file(written(tmp_path, normalizer=albert))
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    assert growth(json.dumps({"normalizer": llama, "decoder": replace("▁", " ")}).encode()) == 1


def test_one_that_sleeps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PATIENCE", 0.001)
    with pytest.raises(InputError, match="takes longer; use another one"):
        open_tokenizer_file(written(tmp_path))


def test_a_file_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *of, **how: (started.append(of), run(*of, **how))[1])
    path = tmp_path / "tokenizer.model"
    path.write_bytes(piece_model("bpe"))
    assert open_tokenizer_file(path).eod == 2
    assert open_tokenizer_file(path, eod="<s>").eod == 1
    assert len(started) == 1
    open_tokenizer_file(written(tmp_path))  # some texts it cannot encode, which is no reason
    assert len(started) == 2


def test_what_cannot_be_opened_is_told_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "t\udcff.json"
    path.write_text("{}")
    with pytest.raises(InputError, match=r"t\\udcff\.json: not a Hugging Face tokenizer, or damaged: "):
        open_tokenizer_file(path)


def test_nothing_slow_is_imported_for_it() -> None:
    program = "import sys, megalite.data.trial; print('torch' in sys.modules)"
    done = subprocess.run([trial.sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
