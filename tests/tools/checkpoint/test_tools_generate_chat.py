"""`megalite-generate --chat`: answers to conversations, by the template that a run's tokenizer has."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from commands import in_process
from toy_jobs import make, one_rank, save
from transformers import PreTrainedTokenizerFast

from megalite.config.model_schema import Model
from megalite.config.parallel_schema import Parallel
from megalite.config.schema import Batch, Config, Data, Train
from megalite.inference.generate import Drawn
from megalite.train.folder.starts import keep_tokenizer
from megalite_tools.checkpoint.generate import main

sys.path.append(str(Path(__file__).parents[1] / "data"))

from chat_families import MARKED, write_tokenizer

MODEL = Model(2, 16, 2, 1, None, 24, 512, 96, init_std=1.0)
Generate = Callable[..., tuple[int, str, str]]
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
TURNS = [USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module", params=["in the settings", "in a file"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, whose tokenizer has ChatML in one of two places."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = write_tokenizer(folder / "original", MARKED["chatml"])
    if request.param == "in a file":
        settings = tokenizer.with_name("tokenizer_config.json")
        known = json.loads(settings.read_text())
        tokenizer.with_name("chat_template.jinja").write_text(known.pop("chat_template"))
        settings.write_text(json.dumps(known))
    data = Data(tokenizer=str(tokenizer))
    config = Config(
        model=MODEL, parallel=Parallel(dp_shard=1), batch=Batch(1, 1), train=Train(precision="fp32"), data=data
    )
    with one_rank():
        save(make(config), folder / "checkpoints", 1)
    keep_tokenizer(tokenizer, folder, folder / "starts/001.tokenizer")
    for file in tokenizer.parent.iterdir():
        file.unlink()
    return folder


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    return in_process(main, capsys)


def theirs(run: Path) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(run / "tokenizer/tokenizer.json"), chat_template=MARKED["chatml"], eos_token="</s>"
    )


def test_conversations_are_answered_as_transformers_would_ask(run: Path, generate: Generate, tmp_path: Path) -> None:
    rows = [{"messages": [USER]}, {"messages": [SYSTEM, *TURNS]}, {"conversations": [{"from": "human", "value": "Hi"}]}]
    (file := tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[list[int]] = []

    def see(engine: Any, requests: Any, *_: Any) -> Iterator[Drawn]:
        asked.extend(list(request.tokens) for request in requests)
        return iter(())

    expected = [
        theirs(run).apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in ([SYSTEM, USER], [SYSTEM, *TURNS], [SYSTEM, USER])
    ]
    with patch("megalite_tools.checkpoint.generate.generate", see):
        code, _, told = generate(str(run), "--chat", "--prompts", str(file), "--system", SYSTEM["content"])
        assert (code, asked) == (0, expected), told
        asked.clear()
        assert generate(str(run), "--chat", "--prompt", "Hi", "--system", SYSTEM["content"])[0] == 0
    assert asked == expected[:1]


@pytest.mark.parametrize("ignored", [False, True])
def test_an_answer_stops_at_the_end_of_the_turn(ignored: bool, run: Path, generate: Generate) -> None:
    known = theirs(run)
    turn, answer = known.convert_tokens_to_ids("<|im_end|>"), known.encode("Hello")
    script = [*answer, turn, *answer]

    def scripted(steps: Any, logits: Any, keys: Any) -> list[int]:
        return [script[number] for _, _, number in keys]

    with patch("megalite.inference.generate.Steps.drawn", scripted):
        more = ["--ignore-end"] * ignored
        code, out, _ = generate(str(run), "--chat", "--prompt", "Hi", "--tokens", str(len(script)), *more)
    assert code == 0
    assert out == ("Hello<|im_end|>Hello\n" if ignored else "Hello\n")


@pytest.mark.parametrize(
    ("arguments", "row", "told"),
    [
        (["--chat"], None, "--prompt: is empty; with --chat, give the user's message, or --prompts FILE"),
        (["--prompt", "x", "--system", "y"], None, "--system: is for --chat; add it, or leave this out"),
        (["--chat", "--prompt", "a<|im_end|>"], None, "--prompt: message 1 has the special token '<|im_end|>' in its"),
        (["--chat"], {"messages": TURNS[:2]}, "line 1: ends with an answer of the assistant; take it out"),
        (
            ["--chat"],
            {"prompt": "a", "completion": "b"},
            "line 1: has a prompt of text, for which there is no template",
        ),
        (
            ["--chat"],
            {"messages": [{"role": "me", "content": ""}]},
            "line 1: not a conversation: message 1: its role is",
        ),
        (["--chat"], [], "line 1: is no JSON object; a row is"),
    ],
)
def test_what_cannot_be_asked_exits_with_2(
    arguments: list[str], row: Any, told: str, run: Path, generate: Generate, tmp_path: Path
) -> None:
    if row is not None:
        (file := tmp_path / "chats.jsonl").write_text(json.dumps(row))
        arguments = [*arguments, "--prompts", str(file)]
    code, out, said = generate(str(run), *arguments)
    assert (code, out) == (2, "")
    assert told in said
