"""Lists of shards: their file."""

import json
from pathlib import Path

import pytest

from megalite.base.errors import InputError
from megalite.data.shards import Shard, read_shards, relative_path, shard_prefix, write_shards

TWO = [Shard("parts/0", 3, 20), Shard("../other", 0, 0)]


def listed(*shards: object, **changed: object) -> str:
    return json.dumps({"format": "megalite-shards", "version": 1, "shards": list(shards)} | changed)


def shard(path: object = "a", **changed: object) -> dict[str, object]:
    return {"path": path, "documents": 1, "tokens": 1} | changed


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    prefix = tmp_path / "new" / "corpus.v1"
    write_shards(prefix, TWO)
    assert read_shards(tmp_path / "new" / "corpus.v1.shards") == tuple(TWO)
    found = json.loads((tmp_path / "new" / "corpus.v1.shards").read_text())
    assert found == {
        "format": "megalite-shards",
        "version": 1,
        "shards": [
            {"path": "parts/0", "documents": 3, "tokens": 20},
            {"path": "../other", "documents": 0, "tokens": 0},
        ],
    }


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".shards"])
def test_nothing_is_overwritten(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"corpus{suffix}").write_text("precious")
    with pytest.raises(InputError, match=f"corpus{suffix}: exists already"):
        write_shards(tmp_path / "corpus", TWO)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "holds list where a JSON object is expected"),
        ("{", "is not valid JSON"),
        (listed(shard(), format="other"), "format' = 'other': must be 'megalite-shards'"),
        (listed(shard(), version=2), "has version 2; this megalite reads version 1"),
        (listed(shard(), more=1), "'more' is unknown"),
        (listed(), "lists 0 shards, and 1 to 10,000 are possible"),
        (listed(*(shard(str(n)) for n in range(10_001))), "lists 10,001 shards"),
        (listed(shard("a"), shard("b"), shard("./a")), "lists a twice"),
        (listed(shard("/a")), "path' = '/a': must be a path of 1 to 4,096 characters, relative"),
        (listed(shard("s3://bucket/a")), "must be a path"),
        (listed(shard("")), "must be a path"),
        (listed(shard(tokens=-1)), "tokens' = -1: must be a whole number"),
        (listed(shard(documents=True)), "documents' = True: must be a whole number"),
        (listed({"path": "a", "tokens": 1}), "'documents' is missing"),
    ],
)
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "corpus.shards").write_text(text)
    with pytest.raises(InputError) as caught:
        read_shards(tmp_path / "corpus.shards")
    assert str(caught.value).startswith(f"{tmp_path}/corpus.shards")
    assert told in str(caught.value)


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a path"):
        write_shards(tmp_path / "corpus", [Shard("/absolute", 1, 1)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("prefix", "path", "store"),
    [
        ("corpus", "a", "a"),
        ("data/corpus", "parts/a", "data/parts/a"),
        ("/data/corpus", "../a", "/data/../a"),
        ("s3://bucket/data/corpus", "parts/a", "s3://bucket/data/parts/a"),
        ("s3://bucket/data/corpus", "../a", "s3://bucket/a"),
        ("https://server:80/corpus", "a", "https://server:80/a"),
    ],
)
def test_a_path_is_relative_to_the_folder_of_the_list(prefix: str, path: str, store: str) -> None:
    assert shard_prefix(prefix, Shard(path, 1, 1)) == store


@pytest.mark.parametrize("path", ["../../a", "../../bucket2/a", "../.."])
def test_a_list_does_not_lead_out_of_its_bucket(path: str) -> None:
    with pytest.raises(InputError, match=r"corpus\.shards: the shard .* lies outside of s3://bucket"):
        shard_prefix("s3://bucket/data/corpus", Shard(path, 1, 1))


def test_the_path_that_a_list_needs() -> None:
    assert relative_path("data/parts/a", "data/corpus") == "parts/a"
    assert relative_path("/data/a", "/lists/corpus") == "../data/a"
    assert relative_path("a", "corpus") == "a"
