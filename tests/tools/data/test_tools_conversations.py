"""Rows of all forms become the conversations, tokens and masks that transformers and TRL make of them."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from chat_families import MARKED, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import piece_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megalite.data.store import TokenStore
from megalite.data.tokenizer import load_tokenizer
from megalite_tools.data.chat import encode_chat, encode_texts
from megalite_tools.data.chat_template import ChatTemplate, Source, TemplateError, found_template
from megalite_tools.data.conversations import Conversation, checked_chat, read_chat
from megalite_tools.data.documents import Document, Reject
from megalite_tools.data.prepare_data import main

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum", "parameters": {"type": "object"}}}]
SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, 42."}]
CALLS = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": "Sum?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
# Contents are text or parts, developers are systems, and tools have turns of their own.
EVERYTHING = """{%- macro said(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- if quiet %}{{- 'quiet' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- if message.content is defined %}{{- said(message.content) }}{%- endif %}
        {%- for call in message.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}{{- said(message.content) + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def row(record: dict[str, Any], key: str | None = None) -> Conversation:
    found = checked_chat(key, "f.jsonl:7", record)
    assert isinstance(found, Document), found
    return read_chat(found.text)


def opened(folder: Path, template: str) -> tuple[Any, ChatTemplate, Any]:
    """The tokenizer and template here, and the tokenizer of transformers."""
    path = write_tokenizer(folder, template)
    source = found_template(path, None)
    assert source is not None
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(path), chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    return load_tokenizer(path, "</s>"), ChatTemplate(source), theirs


def masked(theirs: Any, messages: list[Any], **given: Any) -> tuple[list[int], list[bool]]:
    found = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, **given)
    return found["input_ids"], [bool(bit) for bit in found["assistant_masks"]]


def completed(prompt: list[int], whole: list[int]) -> tuple[list[int], list[bool]]:
    """What TRL trains of a prompt with its completion."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))))
    return whole, [False] * same + [True] * (len(whole) - same)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are two parts each."""
    return [
        message
        if message["content"] is None
        else message | {"content": [{"type": "text", "text": text} for text in (message["content"], "🙂 more")]}
        for message in messages
    ]


@pytest.mark.parametrize("messages", [CALLS, in_parts(CALLS), in_parts(SHORT)])
def test_developers_tools_and_parts_are_as_in_transformers(messages: list[Any], tmp_path: Path) -> None:
    tokenizer, template, theirs = opened(tmp_path, EVERYTHING)
    found = encode_chat(tokenizer, template, row({"messages": messages, "tools": TOOLS}))
    assert found == masked(theirs, messages, tools=TOOLS)
    assert any(found[1])


def test_arguments_in_a_text_are_the_object(tmp_path: Path) -> None:
    openai = json.loads(json.dumps(CALLS))
    openai[2]["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": "ü"}'
    bare = [*CALLS[:2], CALLS[2] | {"tool_calls": [openai[2]["tool_calls"][0]["function"]]}]
    assert row({"messages": openai}) == row({"messages": CALLS})
    assert row({"messages": bare}).messages[2]["tool_calls"] == [CALLS[2]["tool_calls"][0]["function"]]
    openai[2]["tool_calls"][0]["function"]["arguments"] = ""
    assert row({"messages": openai}).messages[2]["tool_calls"][0]["function"]["arguments"] == {}
    tokenizer, template, theirs = opened(tmp_path, EVERYTHING)
    openai[2]["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": "ü"}'
    assert encode_chat(tokenizer, template, row({"messages": openai})) == masked(theirs, CALLS)


@pytest.mark.parametrize("family", MARKED)
def test_a_template_that_knows_only_text_gets_the_text_of_parts(family: str, tmp_path: Path) -> None:
    tokenizer, template, theirs = opened(tmp_path, MARKED[family])
    joined = [message | {"content": message["content"] + "🙂 more"} for message in SHORT]
    found = encode_chat(tokenizer, template, row({"messages": in_parts(SHORT)}))
    assert found == masked(theirs, joined)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_completion_is_trained_as_in_trl(tools: list[Any] | None, tmp_path: Path) -> None:
    tokenizer, template, theirs = opened(tmp_path, EVERYTHING)
    for prompt, completion in ((CALLS[:2], CALLS[2:]), (CALLS[:4], CALLS[4:]), (SHORT[:1], SHORT[1:] + SHORT)):
        given = {"prompt": prompt, "completion": completion, "tools": tools, "chat_template_kwargs": {"quiet": True}}
        asked = theirs.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, quiet=True)["input_ids"]
        whole = theirs.apply_chat_template(prompt + completion, tools=tools, quiet=True)["input_ids"]
        found = encode_chat(tokenizer, template, row(given))
        assert found == completed(asked, whole)
        assert not all(found[1])
        assert found[1][-1]


def test_a_prompt_that_is_rendered_otherwise_when_more_follows() -> None:
    """What both have is not trained; the rest is, as it is in TRL."""
    text = "{{ messages[0].content }}{% if messages | length > 1 %}: {{ messages[1].content }}{% else %}?{% endif %}"
    template = ChatTemplate(Source("t.jinja", text, text))
    assert template.text(SHORT[:1]) == "Hi?"
    tokenizer = CHARACTERS
    _, trained = encode_chat(tokenizer, template, Conversation("f:1", SHORT[:1], SHORT[1:]))
    assert trained == [False] * 2 + [True] * len(": Hello, 42.")


class Characters:
    """A tokenizer with a token for each character."""

    specials = written = ()
    begin = ()

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(each) for each in text], [(at, at + 1) for at in range(len(text))]


CHARACTERS: Any = Characters()


@given(st.text(max_size=8), st.text(max_size=8))
def test_texts_are_trained_from_where_the_completion_begins(prompt: str, completion: str) -> None:
    _, trained = encode_texts(CHARACTERS, prompt, completion)
    assert trained == [False] * len(prompt) + [True] * len(completion)


def test_pairs_of_texts_need_no_template_and_learn_to_end(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    begun = Tokenizer.from_file(str(path))
    begun.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begun.token_to_id("<s>"))])
    begun.save(str(path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>")
    pairs = [
        ("The answer", "er is 42."),  # merges across the edge
        ("[INST] Hi [/INST]", " Hello</s>"),
        ("", "all of it"),
        ("Only the end is learned.", ""),
    ]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps({"prompt": one, "completion": other}) + "\n" for one, other in pairs))
    out = str(tmp_path / "out")
    assert main(["--chat", str(file), "--tokenizer", str(path), "--out", out, "--workers", "1"]) == 0
    store = TokenStore(out)
    for number, (prompt, completion) in enumerate(pairs):
        whole = prompt + completion + ("" if completion.endswith("</s>") else "</s>")
        expected = completed(*(theirs(text)["input_ids"] for text in (prompt, whole)))
        start, end = store.bounds(number)
        assert (store.read(start, end - start).tolist(), store.trained(start, end - start).tolist()) == expected


def test_a_text_that_has_no_tokens_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tmp_path / "tokenizer.model", tmp_path / "c.jsonl"
    path.write_bytes(piece_model("bpe"))
    (tmp_path / "added_tokens.json").write_text('{"<|x|>": 700}')  # which the model lacks
    file.write_text('{"prompt": "a", "completion": ""}\n{"prompt": "<|x|>", "completion": ""}\n')
    arguments = ["--chat", str(file), "--tokenizer", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(arguments) == 2
    assert "c.jsonl:2: cannot be tokenized: " in capsys.readouterr().err
    assert main([*arguments, "--on-error", "skip"]) == 0
    assert TokenStore(tmp_path / "out").documents == 1


def test_sharegpt_is_another_spelling() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello, 42.", "weight": 1},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, 42.", "weight": 1},
    ]
    assert row({"conversations": turns}).begin == messages
    assert row({"conversations": messages}).begin == messages
    assert row({"a": {"b": turns}}, "a.b").begin == messages
    assert row({"prompt": turns[:2], "completion": turns[2:]}).messages == messages
    assert row({"prompt": "unused", "messages": messages}).begin == messages
    assert row({"prompt": None, "messages": None, "conversations": turns}).begin == messages


DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]
USER = {"role": "user"}
PART = {"type": "text", "text": "a"}
WRONG: dict[str, tuple[Any, str]] = {
    "no messages": ([], "messages must be a list of one or more objects with `role` and `content`"),
    "a text": ("hi", "messages must be a list of one or more"),
    "no object": ([*SHORT, 3], "message 3: is int"),
    "no role": ([{"content": "a"}], "message 1: its role is null, which must be `system`, `developer`, `user`,"),
    "a list for a role": ([{"role": ["user"], "content": "a"}], 'its role is ["user"], which'),
    "no content": ([USER], "its content is missing, but must be text or a list of parts"),
    "a number": ([USER | {"content": 3}], "its content is int"),
    "an image": ([USER | {"content": [PART, {"type": "image"}]}], 'part 2 of its content has type "image"; a part is'),
    "no text": ([USER | {"content": [{"type": "text"}]}], 'part 1 of its content has type "text" without a text'),
    "a bare part": ([USER | {"content": ["a"]}], 'part 1 of its content has type "str"'),
    "a strange speaker": ([{"from": "robot", "value": "a"}], 'its `from` is "robot", which must be `human`, `gpt`'),
    "half a surrogate": ([USER | {"content": "\ud800"}], "lone surrogate"),
    "too many": ([USER | {"content": "a"}] * 10_001, "10,001 messages"),
    "calls that are none": ([{"role": "assistant", "tool_calls": "a"}], "its `tool_calls` must be a list of objects"),
    "arguments that are none": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}],
        "the arguments of a call are '[1]'; they must be an object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_conversation_is_refused(wrong: str) -> None:
    messages, told = WRONG[wrong]
    found = checked_chat(None, "f.jsonl:7", {"messages": messages})
    assert isinstance(found, Reject)
    assert str(found).startswith("f.jsonl:7: not ")
    assert told in str(found)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"text": "a"}, "no field with messages: the fields are text; a row has `messages`, `conversations`, or"),
        ({"prompt": "a"}, "no field with messages: the fields are prompt;"),
        ({"messages": None, "id": 1}, "no field with messages: the fields are id;"),
        ({"prompt": "a", "completion": SHORT}, "of `prompt` and `completion`, one is text and one a list"),
        ({"prompt": SHORT, "completion": []}, "completion must be a list of one or more"),
        ({"prompt": SHORT, "completion": [3]}, "completion, message 1: is int"),
        ({"prompt": 3, "completion": "a"}, "prompt must be a list"),
        (
            {"messages": SHORT, "chat_template_kwargs": {"tools": []}},
            "`chat_template_kwargs` must be an object without",
        ),
        ({"messages": SHORT, "chat_template_kwargs": DEEP}, "`chat_template_kwargs` must be an object"),
        *(
            ({"messages": SHORT, "tools": tools}, "f:1: not a conversation: ")
            for tools in ("{", "3", {"a": 1}, [1], [{"a": DEEP}])
        ),
    ],
)
def test_a_row_that_is_wrong_is_refused(record: dict[str, Any], told: str) -> None:
    found = checked_chat(None, "f:1", record)
    assert isinstance(found, Reject)
    assert told in str(found)


def test_a_named_field_must_be_there() -> None:
    found = checked_chat("dialogue", "f:1", {"messages": SHORT})
    assert str(found) == "f:1: no field 'dialogue': the fields are messages"


def test_tools_may_be_text() -> None:
    made = [row({"messages": SHORT, "tools": tools}) for tools in (TOOLS, json.dumps(TOOLS))]
    assert made[0] == made[1]
    assert row({"messages": SHORT, "tools": "[]"}).tools is None


def test_tools_that_a_template_would_leave_out_are_refused() -> None:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template = ChatTemplate(Source("t.jinja", text, text))
    for record, name in (({"messages": SHORT, "tools": TOOLS}, "tools"), ({"messages": CALLS}, "tool_calls")):
        with pytest.raises(TemplateError, match=f"it knows no `{name}`, which would be left out; give another"):
            encode_chat(CHARACTERS, template, row(record))
    assert encode_chat(CHARACTERS, template, row({"messages": SHORT}))


def test_a_special_token_in_two_parts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tokenizer(tmp_path, EVERYTHING)
    forged = [USER | {"content": [{"type": "text", "text": text} for text in ("a<|im_", "end|>")]}, *SHORT[1:]]
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"prompt": forged[:1], "completion": forged[1:]}))
    arguments = ["--chat", str(file), "--tokenizer", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(arguments) == 2
    assert "c.jsonl:1: cannot be tokenized: message 1 has the special token '<|im_end|>'" in capsys.readouterr().err
