"""Hostile and odd YAML: only InputError comes out, in bounded time and memory."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.base.errors import InputError
from megalite.config.convert import keys
from megalite.config.load import dump, load
from megalite.config.yaml import parse

LAUGHS = "a: &a [1, 1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))


def refused(tmp_path: Path, content: bytes | str, overrides: Sequence[str] = ()) -> str:
    path = tmp_path / "file.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        load([str(path)], overrides)
    assert len(str(caught.value)) < 60_000
    return str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "is nested more than 32 deep"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "is nested more than 32 deep"),
        ("model: {layers: " + "9" * 5000 + "}", "a whole number of 5,000 digits"),
        ("model: {layers: 0x" + "f" * 5000 + "}", "a whole number of 5,002 digits"),
        (LAUGHS, "has more than 20,000 values"),
        (
            "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: *b, x: [" + "1, " * 20_000 + "1]}",
            "has more than 20,000 values",
        ),
        ("a: &a [*a]", "refers to what it is inside of"),
        ("x: " + "y" * (1 << 20), "has more than 1,048,576 bytes"),
        (b"\x80\x81\x82", "is not UTF-8 text"),
        ("run: {name: x}".encode("utf-16"), "is not UTF-8 text"),
        (b"run: {name: 'a\x00b'}", "is not valid YAML"),
        ('run: {name: "\\ud800"}', "a text cannot have this character"),
        ("run:\n\tname: x", "is not valid YAML: line 2, column 1"),
        ("model: {layers: 010}", 'model.layers = "010": must be a whole number'),
        ("model: {layers: 1:30}", 'model.layers = "1:30": must be a whole number'),
        ("model: {layers: 2024-01-01}", 'model.layers = "2024-01-01": must be a whole number'),
        ("model: {layers: 1, layers: 2}", "found duplicate key layers"),
        ("a: 1\n---\nb: 1", "column 1: expected a single document in the stream, but found another document"),
        ("1: 2", "a key must be text; put it in quotes"),
        ("? [a]\n: 2", "a key must be text"),
        ("model: !!map [1]", "expected a mapping"),
        ("model: !!map x", "expected a mapping"),
        ("a: !!binary x", "the tag tag:yaml.org,2002:binary has no meaning here"),
        ("a: !!timestamp x", "has no meaning here"),
        ("a: !!int x", "x is no whole number"),
        ("a: !!float x", "x is no number"),
        ("a: !!bool x", "x is neither true nor false"),
        ("run: {name: '${oc.create:[1]}'}", "has a reference that cannot be read"),
        ("run: {name: '${oc.decode:1}'}", "has a reference that cannot be read"),
        ("run: {name: '${unclosed'}", "has a reference that cannot be read"),
        ("run: {name: '${oc.env:MEGALITE_MISSING}'}", "MEGALITE_MISSING, which is not set"),
        ("run: {name: '${run.dir}', dir: '${run.name}'}", "run.name refers to run.dir refers to run.name"),
        ("run: {name: '${run}'}", "refers to run"),
        ("data: {tokenizer: '${data.train[3].path}'}", "refers to data.train[3].path, which is not there"),
        ("run:\n  name: ${run.dir}\n  dir: ???", "refers to run.dir, which has no value yet"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes | str, told: str) -> None:
    assert told in refused(tmp_path, content)


@pytest.mark.timeout(20)
def test_references_cannot_grow_without_end(tmp_path: Path) -> None:
    doubling = "".join(f"  - {{path: '{f'${{data.train[{i + 1}].path}}' * 2}'}}\n" for i in range(25))
    told = refused(tmp_path, f"data:\n  train:\n{doubling}  - {{path: x}}\n")
    assert "has more than 1,048,576 characters once references are filled in" in told


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (str(tmp_path / "fifo"), "/dev/zero", str(tmp_path)):
        with pytest.raises(InputError, match=r"is no regular file|Is a directory"):
            load([path])


@pytest.mark.timeout(20)
def test_includes_are_read_once_and_not_without_end(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.yaml").write_text(f"include: [{number + 1}.yaml, {number + 1}.yaml]")
    (tmp_path / "30.yaml").write_text("model: {layers: 9}")
    assert load([str(tmp_path / "0.yaml")]).model.layers == 9
    for number in range(30, 60):
        (tmp_path / f"{number}.yaml").write_text(f"include: {number + 1}.yaml")
    with pytest.raises(InputError, match="at most 32 are allowed"):
        load([str(tmp_path / "0.yaml")])


def test_merge_keys_and_words_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("log: {tensorboard: no}\noptim: {lr: 1e-4, eps: .5}\nbatch: {global: 1_000}\n")
    config = load([str(path)])
    assert (config.optim.lr, config.optim.eps, config.log.tensorboard, config.batch.global_) == (1e-4, 0.5, False, 1000)
    assert parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_all_that_is_wrong_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        load([], ["model=[]", "zebra=1", "batch.micro=x", "optim.lr=fast", "run.name=${unclosed", "data.train.x=1"])
    lines = [problem.key for problem in caught.value.problems]
    assert sorted(lines) == ["batch.micro", "data.train.x", "model", "optim.lr", "run.name", "zebra"]


words = st.one_of(
    st.text(st.sampled_from("${}[]:,-&*!? \n\t'\"#|>%@`\\.ab01<="), max_size=12),
    st.sampled_from([*keys(), "???", "${model.width}", "<<", "include", "1e400", "-.inf", "~", "*a", "&a", "!!set"]),
)
yaml_texts = st.lists(words, max_size=8).map(" ".join) | st.lists(words, max_size=6).map(": ".join)


@pytest.mark.timeout(60)
@settings(deadline=None, max_examples=100)
@given(yaml_texts, st.lists(st.tuples(st.sampled_from([*keys()]) | words, words), max_size=3))
def test_nothing_but_input_errors_come_of_any_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, pairs: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(text, encoding="utf-8")
    for paths, overrides in (
        ([str(path)], [f"{key}={value}" for key, value in pairs]),
        ([], [f"{key}={text}" for key, _ in pairs]),
    ):
        try:
            config = load(paths, overrides)
        except InputError as error:
            told = str(error)
        else:
            path.write_text(dump(config), encoding="utf-8")
            told = "loaded"
            assert load([str(path)]) == config
        assert 0 < len(told) < 60_000
        assert all(line.isprintable() for line in told.split("\n"))
