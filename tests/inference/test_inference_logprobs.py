"""Log-probabilities of given tokens are those of a forward pass of the whole text, in every layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import inference_cases
import pytest
import torch
from ranks import Ranks

from megalite.base.errors import InputError
from megalite.checkpoint.store.host_group import HostGroup
from megalite.config.layout import Layout
from megalite.config.model_schema import Experts
from megalite.distributed.mesh import Mesh
from megalite.inference.logprobs import logprobs, read_completions

LAYOUTS = [Layout(dp_shard=8), Layout(dp_shard=2, pp=2, tp=2), Layout(pp=4, tp=2), Layout(dp_shard=2, tp=4)]
WITH_EP = [Layout(dp_shard=8, ep=8), Layout(dp_shard=2, pp=2, tp=2, ep=4), Layout(dp_shard=4, pp=2, ep=4)]


@pytest.mark.parametrize(
    ("change", "layouts"),
    [({"vocab_size": 61}, LAYOUTS), ({"experts": Experts(8, 3, 24, first_dense=1)}, WITH_EP)],
    ids=["padded", "experts"],
)
def test_every_layout_finds_what_a_forward_pass_of_the_whole_text_does(
    change: dict[str, Any], layouts: list[Layout], ranks: Ranks, alone: Mesh
) -> None:
    model = replace(inference_cases.MODEL, **change)
    decoder = inference_cases.engine_of(alone, model).decoder
    expected = []
    for given in inference_cases.completions(model.vocab_size):
        whole = torch.tensor([*given.prompt, *given.tokens])
        with torch.inference_mode():
            chances = decoder(whole[:-1, None])[:, 0, : model.vocab_size].log_softmax(-1).gather(1, whole[1:, None])
        values: list[Any] = chances[max(0, len(given.prompt) - 1) :, 0].tolist()
        expected.append(values if given.prompt else [None, *values])
    leader, *others = ranks.run(inference_cases.logprobs_in_layouts, layouts, model)
    assert others == [[None] * len(layouts)] * 7
    for layout, found in zip(layouts, leader, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-10), layout


def test_one_process_needs_no_mesh_of_several(alone: Mesh) -> None:
    engine = inference_cases.engine_of(alone)
    given = inference_cases.completions(engine.model.vocab_size)
    found = logprobs(engine, HostGroup(), given)
    assert found is not None
    assert [len(values) for values in found] == [len(completion.tokens) for completion in given]
    assert [values[0] is None for values in found] == [not completion.prompt for completion in given]


def read(tmp_path: Path, *lines: Any, tokenizer: bool = True, begin: tuple[int, ...] = ()) -> list[tuple[Any, Any]]:
    path = tmp_path / "given.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    letters = inference_cases.Letters(Path("letters")) if tokenizer else None
    found = read_completions(str(path), letters, begin, 64, 8, "there is no tokenizer")
    return [(completion.prompt, completion.tokens) for completion in found]


def test_texts_and_lists_of_tokens_are_read(tmp_path: Path) -> None:
    lines = [{"prompt": "()", "completion": "*+"}, {"prompt": [1], "completion": [2, 3]}, {"completion": [4, 5]}]
    assert read(tmp_path, *lines) == [((40, 41), (42, 43)), ((1,), (2, 3)), ((), (4, 5))]
    assert read(tmp_path, {"completion": "()"}, {"prompt": "(", "completion": ")"}, begin=(7,)) == [
        ((7,), (40, 41)),
        ((7, 40), (41,)),
    ]
    assert read(tmp_path, {"prompt": [], "completion": [0] * 9}, "", tokenizer=False) == [((), (0,) * 9)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "but no JSON"),
        ([1, 2], "is not"),
        ({"prompt": "a"}, "is not"),
        ({"completion": [1, 2], "text": "a"}, "is not"),
        ({"prompt": "a", "completion": [1]}, "both must be of one kind"),
        ({"prompt": [1], "completion": [True]}, "both must be of one kind"),
        ({"prompt": [1], "completion": [-1]}, "both must be of one kind"),
        ({"completion": None}, "both must be of one kind"),
        ({"completion": [1]}, "has no token that follows another one"),
        ({"prompt": "()", "completion": ""}, "has no token that follows another one"),
        ({"prompt": [1], "completion": [64]}, "token 64 is outside model.vocab_size = 64"),
        ({"prompt": [1] * 8, "completion": [2, 3]}, "has 10 tokens, more than the 9 that model.sequence_length = 8"),
        ('{"completion": "\\ud800"}', "both must be of one kind"),
    ],
)
def test_a_line_that_cannot_be_scored_is_told_with_its_number(line: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, {"completion": [1, 2]}, line)
    assert "given.jsonl: line 2: " in str(error.value)
    assert told in str(error.value)


def test_a_text_needs_a_tokenizer_and_a_file_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: is a text; there is no tokenizer"):
        read(tmp_path, {"completion": "()"}, tokenizer=False)
    with pytest.raises(InputError, match=r"given\.jsonl: has no line"):
        read(tmp_path, "")
