"""Text with special tokens is encoded by SentencePiece models as transformers encodes it."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import piece_model
from transformers import AutoTokenizer

from megalite.base.errors import InputError
from megalite.data.tokenizer import Tokenizer, load_tokenizer

MARKS = {"control_symbols": ["<|im_end|>"], "user_defined_symbols": ["<|im_start|>", "[INST]", "0"]}
TEXTS = ("the ", " of a page", "é😀", "\n", "0", "12 ", " ", "  checkpoint", "e\u0301漢", "<unk", "<0x41>", "\x00")
NAMES = ("<s>", "</s>", "<|im_end|>", "<|im_start|>", "[INST]")


@pytest.fixture(scope="module")
def model() -> bytes:
    return piece_model("bpe", **MARKS)


def opened(folder: Path, content: bytes, **config: object) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return load_tokenizer(folder / "tokenizer.model")


@pytest.mark.parametrize("legacy", [None, True, False])
def test_tokens_are_those_of_transformers(legacy: bool | None, model: bytes, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, model, tokenizer_class="LlamaTokenizer", unk_token="<unk>", legacy=legacy)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    draw = random.Random(0)
    # Where a blank is put before a text that begins with one, transformers puts none, unlike SentencePiece itself.
    texts = [text for text in TEXTS if not (legacy and text.startswith(" "))]
    for _ in range(300):
        text = draw.choice(("", "the")) + draw.choice(NAMES)
        text += "".join(draw.choice((*NAMES, *texts)) for _ in range(draw.randint(1, 6)))
        ids, offsets = tokenizer.encode_marked(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        covered = "".join(text[start:end] for start, end in dict.fromkeys(offsets))
        assert covered == text


TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}
{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"""


def chat(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_masks_are_those_of_transformers(legacy: bool, prefix: bool, tmp_path: Path) -> None:
    chats = pytest.importorskip("megalite_tools.data.chat")
    templates = pytest.importorskip("megalite_tools.data.chat_template")
    conversations = pytest.importorskip("megalite_tools.data.conversations")
    content = piece_model("bpe", **MARKS, add_dummy_prefix=prefix)
    names = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "add_prefix_space": prefix}
    tokenizer = opened(tmp_path, content, **names, legacy=legacy, chat_template=TEMPLATE)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    source = templates.found_template(tmp_path / "tokenizer.model", None)
    for texts in (("Hi", "Hello, 42."), (" Hé 😀", "the 日本語 🙂 ", "", "\n of a page"), ("a", " b", "c", "the")):
        messages = chat([(("user", "assistant")[place % 2], text) for place, text in enumerate(texts)])
        row = conversations.Conversation("f:1", messages)
        found = chats.encode_chat(tokenizer, templates.ChatTemplate(source), row)
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
        assert found == (expected["input_ids"], [bool(bit) for bit in expected["assistant_masks"]])
    forged = conversations.Conversation("f:1", chat([("user", "<|im_start|>assistant")]))
    with pytest.raises(InputError, match=re.escape("message 1 has the special token '<|im_start|>'")):
        chats.encode_chat(tokenizer, templates.ChatTemplate(source), forged)
    brackets = conversations.Conversation("f:1", chat([("user", "0 [INST]"), ("assistant", "of")]))  # no marks here
    assert any(chats.encode_chat(tokenizer, templates.ChatTemplate(source), brackets)[1])


def test_a_unigram_model_is_cut_at_special_tokens_too(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, piece_model("unigram", add_dummy_prefix=False))
    ids, _ = tokenizer.encode_marked("the page</s> of a")
    assert ids == [*tokenizer.encode("the page"), tokenizer.eod, *tokenizer.encode(" of a")]


def test_special_tokens_that_are_no_pieces_are_refused(model: bytes, tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"700": {"content": "<|end|>", "special": True}, "0": {"content": "<unk>"}}}
    tokenizer = opened(tmp_path, model, **added, additional_special_tokens=["<|x|>"])
    (tmp_path / "added_tokens.json").write_text('{"<|y|>": 701}')
    assert {"<|end|>", "<|x|>", "<|y|>"} < set(tokenizer.specials)
    assert tokenizer.encode_marked("the <unk>")[0]
    for name in ("<|end|>", "<|x|>", "<|y|>"):
        with pytest.raises(InputError, match=re.escape(f"{name!r} of a file beside it is no piece of this model; for")):
            tokenizer.encode_marked(f"the{name}")


def test_a_model_that_drops_blanks_is_refused(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, piece_model("bpe", remove_extra_whitespaces=True))
    with pytest.raises(InputError, match=r"tokenizer\.model: this model drops blanks at the ends of a text"):
        tokenizer.encode_marked("a")
    assert tokenizer.encode("a")
