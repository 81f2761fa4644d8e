"""Texts that set tokenizers apart: one that encodes and decodes all of them as another does counts as the same."""

ODD_TEXTS = (
    "",
    " ",
    "     ",
    "a",
    " a",
    "  a  b   c    ",
    "\ta\n\n  b\r\nc\x0b\x0c",
    "\n",
    " \n a",
    'The quick brown fox, 1234567890 times: it\'s (so) "fast"!?',
    "def f(x):\n    return {x: [y for y in x if y != '\\n']}\n",
    "naïve façade, ÄÖÜ ẞ, Ελληνικά, Русский",
    "漢字かな交じり文 한국어 ไทย العربية हिन्दी",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "e\u0301 a\u0308\u0304 n\u0303 \u0301x e\u0301\u200d ﬁ\u0301",  # combining marks
    "ﬁ ½ ① Ａ ｶﾞ ㎏ ™",  # changed by normalizing
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u00adg",  # blanks and invisible characters
    "\x00 \x01\x7f\x80",
    "\u2581 \u2581\u2581a",
    "\ufffd \U0010ffff \ue000",
    "<s> </s> <unk> <pad> <0x0A> <|endoftext|> [INST]",
    "a<s>b</s>c<unk>d",
    *(character * length for character in " -=#a" for length in range(2, 40)),
    "https://example.org/a_b-c?d=e&f=%20#g",
)
