"""Renders conversations with the chat template of a tokenizer, and finds which characters are the assistant's.

Templates come from outside: they run in a sandbox, where nothing changes what it is given, and no attribute leads out.
`strftime_now` is not defined, as tokens would depend on the day; templates that use it have a date of their own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from megalite.base.errors import InputError
from megalite.base.files import exists, is_file, read_object
from megalite.data.tokenizer import COMPANION_FILES, MAX_COMPANION_BYTES, TEMPLATE_FILE
from megalite_tools.data.conversations import Message, parts_text

NO_TEMPLATE = (
    f"no chat template: neither {TEMPLATE_FILE} nor `chat_template` in tokenizer_config.json is beside it; name a file "
    "with --template"
)
MAX_TEMPLATE_BYTES = 1 << 20
MAX_RENDERED = 64 << 20  # characters
MAX_EXPONENT = 1000
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields that templates and data have it under
PROBE = "a text that no template has"
Spans = list[tuple[int, int]]  # stretches of characters, [start, end)


class TemplateError(Exception):
    """The template cannot render a conversation, or does not tell which part of it the assistant writes."""


@dataclass(frozen=True)
class Source:
    """A chat template as text, with the special tokens that it may name."""

    path: str  # where it comes from
    text: str
    text_for_tools: str  # the one for conversations with tools
    tokens: tuple[tuple[str, str], ...] = ()  # names, such as bos_token, with texts


def found_template(tokenizer: Path, template: str | None) -> Source | None:
    """The template in the file `template`, or else that of a tokenizer; None: there is none.

    Raises InputError if the file is none.
    """
    beside = [
        read_object(file, MAX_COMPANION_BYTES) for file in map(tokenizer.with_name, COMPANION_FILES) if exists(file)
    ]
    tokens = tuple({name: text for known in reversed(beside) for name, text in _tokens(known)}.items())
    path = Path(template) if template is not None else tokenizer.with_name(TEMPLATE_FILE)
    if template is not None or exists(path):
        text = _read(path)
        return Source(str(path), text, text, tokens)
    config = tokenizer.with_name("tokenizer_config.json")
    named = (beside[0] if exists(config) else {}).get("chat_template")
    if isinstance(named, list):
        several = {each.get("name"): each.get("template") for each in named if isinstance(each, dict)}
        default, for_tools = several.get("default"), several.get("tool_use", several.get("default"))
    else:
        default = for_tools = named
    if isinstance(default, str) and isinstance(for_tools, str):
        return Source(str(config), default, for_tools, tokens)
    return None


def _tokens(known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, token in known.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            yield name, text


def _read(path: Path) -> str:
    if not is_file(path):
        raise InputError(f"{path}: no such file; --template names a chat template, in Jinja")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) <= MAX_TEMPLATE_BYTES:
            return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the chat template: {error}") from error
    raise InputError(f"{path}: is larger than {MAX_TEMPLATE_BYTES:,} bytes, more than a chat template ever has")


class ChatTemplate:
    """A compiled template. Raises InputError if it is none."""

    def __init__(self, source: Source) -> None:
        self.source = source
        try:
            self._plain, self._for_tools = (
                _Compiled(text, dict(source.tokens)) for text in (source.text, source.text_for_tools)
            )
        except (jinja2.TemplateError, RecursionError, MemoryError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise InputError(f"{source.path}: not a chat template{line}: {error}") from error

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        ask: bool = False,
    ) -> str:
        """The text of a conversation, with the prompt for an answer if `ask`. Raises TemplateError."""
        compiled, given = self._given(messages, tools, variables)
        return compiled.render({**given, "add_generation_prompt": ask})[0]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, Spans]:
        """The text of a conversation, and the parts of it that the assistant writes. Raises TemplateError.

        They are those that `{% generation %}` marks. In a template without such marks, an assistant's message is what
        it adds to the text of those before, with the prompt for an answer.
        """
        compiled, given = self._given(messages, tools, variables)
        text, marked = compiled.render(given)
        if compiled.marks:
            return text, marked
        return text, [
            self._added(compiled, text, given, number)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Raises TemplateError for tools or calls of them that the template never looks at, and so would leave out."""
        text = self.source.text if tools is None else self.source.text_for_tools
        there = {"tools": tools, "tool_calls": any(message.get("tool_calls") for message in messages)}
        for name, given in there.items():
            if given and name not in text:
                rule = f"it knows no `{name}`, which would be left out"
                raise TemplateError(f"{rule}; give another template with --template, or take them out")

    def _given(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any] | None
    ) -> tuple["_Compiled", dict[str, Any]]:
        """The template for a conversation, and the variables that it gets."""
        compiled = self._for_tools if tools is not None else self._plain
        plain = [_plain(message) for message in messages]
        if any(isinstance(message.get("content"), list) for message in plain) and not compiled.takes_parts:
            plain = [_joined(message) for message in plain]
        more = {"documents": None, **(variables or {})}
        return compiled, {**more, "messages": plain, "tools": tools, "add_generation_prompt": False}

    def _added(self, compiled: "_Compiled", text: str, given: Mapping[str, Any], number: int) -> tuple[int, int]:
        def rendered(count: int, prompt: bool) -> str:
            part = {"messages": given["messages"][:count], "add_generation_prompt": prompt}
            return compiled.render({**given, **part})[0]

        before = rendered(number, prompt=True)
        until = rendered(number + 1, prompt=False)
        if not (text.startswith(until) and until.startswith(before)):
            rule = f"message {number + 1} changes how the template renders those before it, or the prompt for an answer"
            raise TemplateError(f"{rule}, so its part cannot be told; put {{% generation %}} marks into the template")
        return len(before), len(until)


class _Compiled:
    """One template, with the special tokens that it may name, and whether it has marks."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        if len(text) > MAX_TEMPLATE_BYTES:
            raise jinja2.TemplateError(f"it has {len(text):,} characters; {MAX_TEMPLATE_BYTES:,} are allowed")
        self._environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
        self._template = self._environment.from_string(text)
        self._tokens = tokens

    @property
    def marks(self) -> bool:
        """Return whether the text of the template has `{% generation %}`, rendered or not."""
        return self._environment.has_marks

    @cached_property
    def takes_parts(self) -> bool:
        """Return whether contents may be lists of parts: others take them for a text, or leave them out."""
        parts = [{"type": "text", "text": PROBE}]
        messages = [{"role": role, "content": parts} for role in ("user", "assistant")]
        try:
            text = self.render({"messages": messages, "tools": None, "add_generation_prompt": False})[0]
        except TemplateError:
            return False
        return text.count(PROBE) == len(messages) and str(parts) not in text

    def render(self, variables: Mapping[str, Any]) -> tuple[str, Spans]:
        environment = self._environment
        environment.spans, environment.blocks, environment.length = [], [], 0
        with _explained():
            for block in self._template.generate({**self._tokens, **variables}):
                environment.blocks.append(block)
                environment.length += len(block)
                if environment.length > MAX_RENDERED:
                    raise TemplateError(f"the text is longer than {MAX_RENDERED:,} characters")
        text = "".join(environment.blocks)
        for start, inside in environment.spans:
            if not text.startswith(inside, start):
                raise TemplateError(
                    "`{% generation %}` stands inside of a macro or a filter, so its place is not known"
                )
        return text, [(start, start + len(inside)) for start, inside in environment.spans]


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that transformers gives to templates, less the clock, and with no powers that take for ever."""

    intercepted_binops = frozenset({"**"})
    has_marks = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        del self.globals["lipsum"], self.filters["random"]  # a store is a function of its input
        self.spans: list[tuple[int, str]] = []  # beginnings and texts of what was marked
        self.blocks: list[str] = []
        self.length = 0  # characters of blocks

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if abs(right) > MAX_EXPONENT or abs(left) > 1 << 64:
            raise SecurityError(f"a power of {str(right)[:20]}; up to {MAX_EXPONENT} is allowed")
        return super().call_binop(context, operator, left, right)


class _Marks(Extension):
    """`{% generation %} … {% endgeneration %}`, around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        self.environment.has_marks = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text: str = caller()
        self.environment.spans.append((self.environment.length, text))  # type: ignore[attr-defined]
        return text


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain(message: Message) -> Message:
    """A message without fields that are null, which many templates take for text; reasoning has all of its names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _joined(message: Message) -> Message:
    """A message whose content is text, if it was parts of one."""
    content = message.get("content")
    return {**message, "content": parts_text(content)} if isinstance(content, list) else message


@contextmanager
def _explained() -> Iterator[None]:
    """Turn all that templates can raise into a TemplateError."""
    try:
        yield
    except TemplateError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"{type(error).__name__}: {reason[:300]}") from error
