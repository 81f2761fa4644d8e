"""Rows of JSON Lines as conversations: in the form of OpenAI and transformers, of ShareGPT, or a prompt and completion.

A conversation comes out in the form that chat templates of transformers read, whatever form it had.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from megalite.base.errors import listing
from megalite_tools.data.documents import Document, Missing, Reject, inside, missing

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}  # names that differ
BUILT_IN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})  # variables that a template gets anyway
MAX_MESSAGES = 10_000
MAX_DEPTH = 100  # lists and objects, one in the other

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One row: messages, or a prompt with its completion, both of messages or both of text."""

    origin: str  # FILE:LINE
    begin: list[Message] | str  # all messages, or the prompt
    completion: list[Message] | str | None = None
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # more of them, for the template

    @property
    def messages(self) -> list[Message]:
        """All messages. There are none where a prompt is text."""
        return [message for part in (self.begin, self.completion) if isinstance(part, list) for message in part]


def checked_chat(key: str | None, origin: str, record: dict[str, Any]) -> Document | Reject:
    """A conversation as a document, whose text is JSON for `read_chat`; or why it is none.

    key: the field with the messages; None: the one of the form that the row has.
    """
    found = _fields(key, record)
    if isinstance(found, Missing):
        return missing(origin, key, found.fields) if key is not None else _formless(origin, found.fields)
    try:
        parts = [_part(name, value) for name, value in found.items()]
        tools, variables = _tools(record.get("tools")), _variables(record.get("chat_template_kwargs"))
    except ValueError as error:
        return Reject(origin, "not a conversation", str(error))
    completion = parts[1] if len(parts) > 1 else None
    if completion is not None and type(parts[0]) is not type(completion):
        return Reject(origin, "not a conversation", "of `prompt` and `completion`, one is text and one a list")
    if len(parts) == 1 and isinstance(parts[0], str):
        return Reject(origin, "not a conversation", f"{_no_list(next(iter(found)))}")
    row = Conversation(origin, parts[0], completion, tools, variables)
    if len(row.messages) > MAX_MESSAGES:
        return Reject(origin, "not a conversation", f"{len(row.messages):,} messages; {MAX_MESSAGES:,} are allowed")
    if _deep([row.messages, tools, variables]):
        rule = f"more than {MAX_DEPTH} lists and objects lie one in the other"
        return Reject(origin, "not a conversation", rule)
    text = json.dumps(astuple(row), ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Reject(origin, "not valid Unicode", f"lone surrogate {text[error.start]!a}")
    return Document(text)


def read_chat(text: str) -> Conversation:
    """The conversation of which `checked_chat` has made a text."""
    return Conversation(*json.loads(text))


def parts_text(content: Sequence[dict[str, Any]]) -> str:
    """The text of a content that is a list of parts."""
    return "".join(part["text"] for part in content)


def _fields(key: str | None, record: dict[str, Any]) -> dict[str, object] | Missing:
    """The field with the messages, or the prompt and the completion."""
    if key is not None:
        value = inside(record, key)
        return value if isinstance(value, Missing) else {key: value}
    for names in (["messages"], ["conversations"], ["prompt", "completion"]):
        if all(record.get(name) is not None for name in names):  # tables of several forms have nulls
            return {name: record[name] for name in names}
    return Missing(tuple(name for name, value in record.items() if value is not None))


def _formless(origin: str, fields: Sequence[str]) -> Reject:
    names = ", ".join(fields)[:500] or "none"
    detail = f"the fields are {names}; a row has `messages`, `conversations`, or `prompt` and `completion`"
    return Reject(origin, "no field with messages", detail)


def _part(name: str, value: object) -> list[Message] | str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(_no_list(name))
    messages = []
    for number, message in enumerate(value, 1):
        try:
            messages.append(_message(message))
        except ValueError as error:
            raise ValueError(f"{'' if name == 'messages' else f'{name}, '}message {number}: {error}") from None
    return messages


def _no_list(name: str) -> str:
    return f"{name} must be a list of one or more objects with `role` and `content`, or with `from` and `value`"


def _message(given: object) -> Message:
    """A message as templates read it. Raises ValueError with the rule that it breaks."""
    if not isinstance(given, dict):
        raise ValueError(f"is {type(given).__name__}, not an object with `role` and `content`")
    message: Message = dict(given)
    named = "role"
    if "role" not in message and "from" in message:
        named, role = "from", message.pop("from")
        message["role"] = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        allowed = [f"`{each}`" for each in ((*SHAREGPT_ROLES, *ROLES) if named == "from" else ROLES)]
        shown = json.dumps(given.get(named))[:50]
        raise ValueError(f"its {'role' if named == 'role' else '`from`'} is {shown}, which must be {listing(allowed)}")
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"])
    if isinstance(content, list):
        for number, part in enumerate(content, 1):
            _check_part(number, part)
    elif not isinstance(content, str) and not (content is None and role == "assistant" and message.get("tool_calls")):
        found = "missing" if content is None else type(content).__name__
        rule = "must be text or a list of parts; only an assistant's message with `tool_calls` may have none"
        raise ValueError(f"its content is {found}, but {rule}")
    return message


def _check_part(number: int, part: object) -> None:
    fields = part if isinstance(part, dict) else {"type": type(part).__name__}
    if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
        kind = json.dumps(fields.get("type"))[:50] + (" without a text" if fields.get("type") == "text" else "")
        fix = 'a part is {"type": "text", "text": "…"}; take others out, as models here read text alone'
        raise ValueError(f"part {number} of its content has type {kind}; {fix}")


def _calls(calls: object) -> list[Any]:
    """Calls of tools. Arguments that are JSON in a text, as OpenAI has them, become the object, as templates want."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError("its `tool_calls` must be a list of objects")
    return [
        {**call, "function": _call(call["function"])} if isinstance(call.get("function"), dict) else _call(call)
        for call in calls
    ]


def _call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"the arguments of a call are {arguments[:50]!r}; they must be an object, or a text with JSON of one"
        )
    return {**function, "arguments": found}


def _tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise ValueError("`tools` is a text that is no JSON; give a list of objects") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("`tools` must be a list of objects")
    return tools


def _variables(variables: object) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, dict) or BUILT_IN_VARIABLES.intersection(variables):
        raise ValueError(f"`chat_template_kwargs` must be an object without {listing(sorted(BUILT_IN_VARIABLES))}")
    return variables


def _deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items]
    return bool(level)
