"""`megalite-generate`: text from a run folder."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import in_process
from tampering import tamper
from toy_jobs import make, one_rank, save
from warm_start import run as start

from megalite.base.output import Lost
from megalite.checkpoint.store.files import METADATA
from megalite.checkpoint.store.host_group import HostGroup
from megalite.checkpoint.store.manifest import MANIFEST
from megalite.checkpoint.store.state import State
from megalite.config.convert import to_plain
from megalite.config.model_schema import Experts, Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Data, Train
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.inference.generate import Drawn, Request
from megalite.inference.prompts import CHARACTERS_PER_TOKEN
from megalite.inference.source import sources
from megalite.train.folder.starts import keep_tokenizer
from megalite_tools.checkpoint.generate import main

# Strong weights, so that what follows depends on what came before; a vocabulary padded beyond the tokenizer's 320.
MODEL = Model(
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab_size=512,
    sequence_length=24,
    init_std=1.0,
    experts=Experts(4, width=16),
)
Generate = Callable[..., tuple[int, str, str]]
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A run folder with two checkpoints of different weights."""
    folder = tmp_path_factory.mktemp("run")
    config = Config(
        model=MODEL,
        parallel=Parallel(pp=1, dp_shard=1),
        batch=Batch(1, 1),
        train=Train(precision="fp32"),
        data=Data(tokenizer=str(tokenizer_file)),
    )
    with one_rank():
        for step in (1, 2):
            job = make(replace(config, run=replace(config.run, seed=step)))
            save(job, folder / "checkpoints", step)
    trained = replace(config, parallel=Parallel(pp=2, tp=2, dp_shard=2), train=Train(precision="bf16", compile=True))
    for path in (folder / "checkpoints").iterdir():
        tamper(path, lambda fields: fields.update(config=to_plain(trained)))
    keep_tokenizer(tokenizer_file, folder, folder / "starts/001.tokenizer")
    return folder


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """Runs the command; its exit code and what it printed to stdout and stderr."""

    return in_process(main, capsys)


def test_the_text_begins_with_the_prompt_and_is_the_same_every_time(
    generate: Generate, run: Path, tokenizer_file: Path
) -> None:
    code, text, errors = generate(run, "--prompt", PROMPT, "--tokens", 12)
    assert (code, errors.splitlines()[0]) == (0, f"tokenizer: {run}/tokenizer/{tokenizer_file.name}")
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT) + 1
    assert text.endswith("\n")
    assert generate(run, "--prompt", PROMPT, "--tokens", 12)[1] == text


def test_the_tokenizers_copy_in_the_run_folder_is_found_from_anywhere(
    generate: Generate, run: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(run, "--prompt", PROMPT, "--tokens", 3)[1]
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").iterdir():
        tamper(path, lambda fields: fields["config"]["data"].update(tokenizer="data/moved.model"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, text, errors = generate("../run", "--prompt", PROMPT, "--tokens", 3)
    assert (code, text) == (0, expected)
    assert errors.splitlines()[0].endswith(f"/run/tokenizer/{tokenizer_file.name}")


def test_seeds_draw_different_texts(generate: Generate, run: Path) -> None:
    texts = {generate(run, "--prompt", PROMPT, "--temperature", 2, "--top-k", 0, "--seed", n)[1] for n in range(3)}
    assert len(texts) == 3


def test_temperature_0_and_top_1_take_the_likeliest(generate: Generate, run: Path) -> None:
    greedy = generate(run, "--prompt", PROMPT, "--temperature", 0)[1]
    for seed in (1, 2):
        assert generate(run, "--prompt", PROMPT, "--temperature", 3, "--top-k", 1, "--seed", seed)[1] == greedy
        assert generate(run, "--prompt", PROMPT, "--temperature", 0, "--seed", seed)[1] == greedy


def test_a_run_means_its_newest_checkpoint(generate: Generate, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = generate(run, "--prompt", PROMPT)
    checkpoints = run / "checkpoints"
    assert generate(checkpoints / "step-00000002", "--prompt", PROMPT)[1] == newest[1]
    older = generate(checkpoints / "step-00000001", "--prompt", PROMPT)
    assert older[0] == 0
    assert older[1] != newest[1]
    monkeypatch.chdir(checkpoints)
    assert generate("step-00000001", "--prompt", PROMPT)[1] == older[1]


def test_a_prompt_longer_than_the_models_sequence(generate: Generate, run: Path) -> None:
    code, text, errors = generate(run, "--prompt", PROMPT * 10, "--tokens", 3)
    assert code == 0
    assert "warning: of the prompt, the model sees the last 22 tokens only\n" in errors
    assert text.startswith(PROMPT * 10)


def test_of_a_long_prompt_no_more_is_encoded_than_the_model_can_see(
    generate: Generate, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encoded.append(len(text)) or encode(self, text))
    (tmp_path / "prompt").write_text("word " * 100_000)
    assert generate(run, "--prompt-file", tmp_path / "prompt", "--tokens", 1)[0] == 0
    assert max(encoded) <= CHARACTERS_PER_TOKEN * MODEL.sequence_length


def test_no_prompt_starts_a_document(generate: Generate, run: Path, tokenizer_file: Path) -> None:
    code, text, errors = generate(run, "--tokens", 3)
    assert (code, errors.splitlines()[0]) == (0, f"tokenizer: {run}/tokenizer/{tokenizer_file.name}")
    assert text != "\n"


def test_weights_that_are_too_large_to_write_with_are_told(
    generate: Generate, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(source: str, model: Model, base: str | None, state: State, group: HostGroup) -> None:
        for weight in state.weights().values():
            weight.fill_(1e15)

    monkeypatch.setattr("megalite.inference.source._fill", too_large)
    for temperature in (0, 1):
        code, _, errors = generate(run, "--prompt", PROMPT, "--temperature", temperature)
        assert code == 2
        assert "the model's logits are not finite: its weights are too large" in errors


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path) -> Callable[[Iterable[int]], None]:
    """Has the model draw these tokens."""
    end = load_tokenizer(tokenizer_file).eod

    def draw(tokens: Iterable[int]) -> None:
        def generate(_: object, requests: Sequence[Request], *others: object) -> Iterator[Drawn]:
            return (Drawn(requests[0], token, "stop" if token == end else None) for token in tokens)

        monkeypatch.setattr("megalite_tools.checkpoint.generate.generate", generate)

    return draw


def test_a_terminal_is_given_nothing_that_could_disturb_it(
    generate: Generate, run: Path, tokenizer_file: Path, drawn: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = load_tokenizer(tokenizer_file).encode("a\x1b[31mb\n")
    drawn(ids)
    assert generate(run, "--prompt", "")[1] == "a\x1b[31mb\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate(run, "--prompt", "")[1] == "a\\x1b[31mb\n\n"


def test_the_text_ends_with_its_document(
    generate: Generate, run: Path, tokenizer_file: Path, drawn: Callable[..., None]
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    ids = tokenizer.encode("fox jumps")
    drawn([*ids, tokenizer.eod, *ids])
    assert generate(run, "--prompt", "")[1] == "fox jumps\n"


def test_a_character_of_several_tokens_appears_whole(
    generate: Generate, run: Path, tokenizer_file: Path, drawn: Callable[..., None]
) -> None:
    ids = load_tokenizer(tokenizer_file).encode("a€b")
    assert len(ids) >= 5  # the euro sign is in pieces of single bytes
    drawn(ids)
    assert generate(run, "--prompt", "")[1].strip() == "a€b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such folder; give a run folder"),
        (["{run}/tokenizer"], "tokenizer: holds no weights of a known kind"),
        (["{run}/checkpoints/step-00000009"], "step-00000009: there is no such folder"),
        (["{run}", "--tokenizer", "nowhere.model"], "nowhere.model"),
        (["{run}", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["{run}", "--temperature", "-1"], "--temperature"),
        (["{run}", "--temperature", "nan"], "--temperature nan: must be a number of at least 0"),
        (["{run}", "--temperature", "inf"], "--temperature"),
        (["{run}", "--top-k", "-1"], "--top-k"),
        (["{run}", "--top-p", "0"], "--top-p 0.0: must be above 0 and at most 1"),
        (["{run}", "--top-p", "1.1"], "--top-p"),
        (["{run}", "--top-p", "nan"], "--top-p"),
        (["{run}", "--seed", "-1"], "--seed -1: must be from 0 to"),
        (["{run}", "--seed", str(1 << 63)], "--seed"),
    ],
)
def test_bad_input_exits_with_2(generate: Generate, run: Path, arguments: list[str], message: str) -> None:
    code, text, errors = generate(*[argument.format(run=run) for argument in arguments])
    assert code == 2
    assert text == ""
    assert errors.startswith("megalite-generate: error: ")
    assert message in errors


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(
    generate: Generate, run: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    tokenizer.vocab_size = 513
    monkeypatch.setattr("megalite.inference.source.open_tokenizer_file", lambda _: tokenizer)
    code, _, errors = generate(run)
    assert code == 2
    assert "has 513 tokens, but the model" in errors


def test_a_run_without_tokenizer_needs_one(generate: Generate, run: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    """One that only a checkpoint names is not opened, nor is one behind a link."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "tokenizer").rename(tmp_path / "elsewhere")
    assert f"run: has no copy of the model's tokenizer; give --tokenizer, as '{tokenizer_file}" in generate(copy)[2]
    (copy / "tokenizer").symlink_to(tmp_path / "elsewhere")
    assert generate(copy)[0] == 2
    (copy / "tokenizer").unlink()
    (copy / "tokenizer").mkdir()
    (copy / "tokenizer" / tokenizer_file.name).symlink_to(tokenizer_file)
    for path in (copy / "checkpoints").iterdir():
        tamper(path, lambda fields: fields["config"]["data"].update(tokenizer=None))
    code, _, errors = generate(copy)
    assert code == 2
    assert errors.endswith("give --tokenizer\n")
    assert generate(copy, "--tokenizer", tokenizer_file)[0] == 0


def test_a_tokenizer_without_end_of_document_needs_a_prompt(
    generate: Generate, run: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    tokenizer._eod = None
    monkeypatch.setattr("megalite.inference.source.open_tokenizer_file", lambda _: tokenizer)
    code, _, errors = generate(run)
    assert code == 2
    assert "give --prompt" in errors
    assert generate(run, "--prompt", PROMPT)[0] == 0


def test_interrupted_saves_are_passed_over(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (found,) = sources(str(tmp_path))
    assert found.args == (f"megalite:{tmp_path}/checkpoints/step-00000001", tmp_path, 1, None)  # type: ignore[attr-defined]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "data": lambda path: flip(path / "__0_0.distcp"),
    "manifest": lambda path: flip(path / MANIFEST),
    "index of other programs": lambda path: flip(path / METADATA),
    "an absurd model": lambda path: tamper(path, lambda fields: fields["config"]["model"].update(layers=10**12)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_of_a_damaged_checkpoint_the_one_before_is_used(
    how: str, generate: Generate, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    newest = copy / "checkpoints/step-00000002"
    DAMAGE[how](newest)
    code, text, errors = generate(copy, "--prompt", PROMPT)
    assert (code, text) == generate(run / "checkpoints/step-00000001", "--prompt", PROMPT)[:2]
    assert errors.startswith(f"megalite-generate: warning: {newest}: ")
    assert "; the checkpoint before is used\n" in errors
    code, text, errors = generate(newest, "--prompt", PROMPT)
    assert (code, text) == (2, "")


@pytest.mark.parametrize("given", ["file", "stdin"])
def test_a_prompt_from_a_file_is_taken_as_it_is(
    given: str, generate: Generate, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The quick é\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    found = generate(run, "--prompt-file", tmp_path / "prompt.txt" if given == "file" else "-", "--tokens", 3)
    assert found[:2] == generate(run, "--prompt", text, "--tokens", 3)[:2]
    assert found[0] == 0
    assert found[1].startswith(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\xff", "is no UTF-8 at byte 1"), (b"a" * (1 << 24) + b"b", "is longer than"), (None, "cannot be read: ")],
)
def test_a_prompt_that_is_no_text_is_refused(
    content: bytes | None, message: str, generate: Generate, run: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "prompt").write_bytes(content)
    code, text, errors = generate(run, "--prompt-file", tmp_path / "prompt")
    assert (code, text) == (2, "")
    assert f"--prompt-file {tmp_path / 'prompt'}: {message}" in errors


def test_a_prompt_that_is_no_utf8_or_not_there_is_refused(
    generate: Generate, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--prompt: is no UTF-8 at byte 1" in generate(run, "--prompt", os.fsdecode(b"a\xff"))[2]
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input: is closed" in generate(run, "--prompt-file", "-")[2]


def test_an_interrupt_leaves_what_was_written(
    generate: Generate, run: Path, tokenizer_file: Path, drawn: Callable[..., None]
) -> None:
    def interrupted() -> Iterator[int]:
        yield from load_tokenizer(tokenizer_file).encode("fox jumps")
        raise KeyboardInterrupt

    drawn(interrupted())
    code, text, errors = generate(run)
    assert (code, text) == (130, "fox jumps")
    assert errors.endswith("megalite-generate: interrupted\n")


def test_a_reader_who_has_left_ends_it(run: Path, drawn: Callable[..., None], generate: Generate) -> None:
    def left() -> Iterator[int]:
        raise Lost("stdout", BrokenPipeError())
        yield 0

    drawn(left())
    code, _, errors = generate(run)
    assert code == 141
    assert "error" not in errors


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "The quick"}\n{"tokens": [40, 41]}\n{"prompt": ""}\n{"prompt": "fox jumps over"}\n')
    return path


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_many_prompts_are_answered_in_json_lines(
    generate: Generate, run: Path, prompts: Path, tokenizer_file: Path
) -> None:
    code, text, errors = generate(run, "--prompts", prompts, "--tokens", 6, "--batch", 2, "--seed", 5)
    assert code == 0
    found = lines_of(text)
    assert [line["index"] for line in found] == [0, 1, 2, 3]
    assert [line["prompt"] for line in found] == ["The quick", None, "", "fox jumps over"]
    assert "tokens/s" in errors
    tokenizer = load_tokenizer(tokenizer_file)
    for line in found:
        assert line["text"] == tokenizer.decode(line["tokens"])
        assert line["finish_reason"] == ("length" if len(line["tokens"]) == 6 else "stop")
    alone = generate(run, "--prompt", "The quick", "--tokens", 6, "--seed", 5)[1]
    assert alone == f"The quick{found[0]['text']}\n"
    assert generate(run, "--prompts", prompts, "--tokens", 6, "--batch", 16, "--seed", 5)[1] == text


def test_samples_of_a_prompt_differ(generate: Generate, run: Path) -> None:
    code, text, _ = generate(run, "--prompt", PROMPT, "--tokens", 6, "--samples", 3, "--temperature", 2, "--top-k", 0)
    found = lines_of(text)
    assert code == 0
    assert [(line["index"], line["sample"]) for line in found] == [(0, 0), (0, 1), (0, 2)]
    assert len({line["text"] for line in found}) == 3


def test_lines_go_to_a_file_whole_or_not_at_all(
    generate: Generate, run: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(run, "--prompts", prompts, "--tokens", 3, "--out", out)[:2] == (0, "")
    assert len(lines_of(out.read_text())) == 4
    before = out.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megalite_tools.checkpoint.generate.write_lines", interrupted)
    assert generate(run, "--prompts", prompts, "--out", out)[0] == 130
    assert out.read_bytes() == before
    for refused in (tmp_path, tmp_path / "nowhere" / "out.jsonl"):
        code, _, errors = generate(run, "--prompts", prompts, "--out", refused)
        assert code == 2
        assert str(refused) in errors


def test_a_document_may_be_gone_beyond(
    generate: Generate, run: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--prompt", PROMPT, "--tokens", 8, "--samples", 2]
    whole = lines_of(generate(run, *options, "--ignore-end")[1])[0]["tokens"]
    tokenizer = load_tokenizer(tokenizer_file)
    tokenizer._eod = whole[5]
    monkeypatch.setattr("megalite.inference.source.open_tokenizer_file", lambda _: tokenizer)
    ended = lines_of(generate(run, *options)[1])[0]
    assert (ended["tokens"], ended["finish_reason"]) == (whole[: whole.index(whole[5])], "stop")
    gone_on = lines_of(generate(run, *options, "--ignore-end")[1])[0]
    assert (gone_on["tokens"], gone_on["finish_reason"]) == (whole, "length")


@pytest.mark.timeout(120)
def test_local_ranks_write_what_one_writes(run: Path, prompts: Path, generate: Generate) -> None:
    options = [run, "--prompts", prompts, "--tokens", 5, "--batch", 3]
    _, expected, told = generate(*options)
    command = ["-m", "megalite_tools.checkpoint.generate", *map(str, options), "--device", "cpu"]
    found = start([*command, "--pp", "2", "--ep", "2"], 100)
    assert (found.returncode, found.stdout) == (0, expected), found.stderr
    assert re.findall(r"(\d+) tokens,", found.stderr) == re.findall(r"(\d+) tokens,", told)
    refused = start([*command, "--tp", "2"], 100)
    assert refused.returncode == 2
    assert "--tp 2: must divide model.kv_heads = 1" in refused.stderr


@pytest.mark.timeout(120)
def test_a_copy_without_a_prompt_joins_until_the_text_ends(run: Path, tokenizer_file: Path, generate: Generate) -> None:
    options = [run, "--prompt", PROMPT, "--tokens", 5]
    expected = generate(*options)[1]
    command = ["-m", "megalite_tools.checkpoint.generate", *map(str, options), "--device", "cpu"]
    found = start([*command, "--ep", "4"], 100)
    assert (found.returncode, found.stdout) == (0, expected), found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--samples", "0"], "--samples 0: must be at least 1"),
        (["--tp", "0"], "--tp, --pp, --ep and --dp must be at least 1"),
        (["--tp", "2", "--ep", "3"], "--ep 3: must be a multiple of --tp = 2, whose ranks have different experts"),
        (["--prompts", "-", "--pp", "2"], "standard input is for a single rank"),
        (["--prompts", "nowhere"], "--prompts nowhere: cannot be read"),
    ],
)
def test_options_that_cannot_be_exit_with_2(generate: Generate, run: Path, arguments: list[str], message: str) -> None:
    code, text, errors = generate(run, *arguments)
    assert (code, text) == (2, "")
    assert message in errors
