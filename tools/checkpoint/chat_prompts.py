"""Conversations as prompts: rendered with a chat template, so that the model writes the assistant's next message."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.base.errors import InputError
from megalite.base.json_bounds import parse
from megalite.data.tokenizer import Tokenizer
from megalite.inference.prompts import Prompt, read_lines
from megalite_tools.data.chat import compiled, encode_prompt, end_of_turn
from megalite_tools.data.chat_template import NO_TEMPLATE, TemplateError, found_template
from megalite_tools.data.conversations import Conversation, checked_chat, read_chat
from megalite_tools.data.documents import Reject


def user_turn(prompt: Prompt) -> Conversation:
    """A conversation that begins with a message of the user. Raises InputError if there is none."""
    if not prompt.text:
        raise InputError(f"{prompt.where}: is empty; with --chat, give the user's message, or --prompts FILE")
    return Conversation(prompt.where, [{"role": "user", "content": prompt.text}])


def read_conversations(file: str) -> list[Conversation]:
    """The conversations of JSON Lines, in the forms of `megalite-prepare-data --chat`. Raises InputError."""
    return [_conversation(line, place) for place, line in read_lines(file)]


def rendered(
    chats: Sequence[Conversation], tokenizer: Tokenizer, template: str | None, system: str | None
) -> tuple[list[Prompt], int | None]:
    """Prompts that ask for an answer to each conversation, and the token with which the template ends an answer.

    template: the file of one; None: that of the tokenizer. system: text of a first message, where a conversation has no
    system message. Raises InputError.
    """
    source = found_template(tokenizer.path, template)
    if source is None:
        raise InputError(f"{tokenizer.path}: {NO_TEMPLATE}")
    chosen = compiled(source)
    prompts = []
    for chat in chats:
        messages = chat.messages
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        try:
            text, tokens = encode_prompt(tokenizer, chosen, replace(chat, begin=messages))
        except TemplateError as error:
            raise InputError(f"{chat.origin}: {source.path} cannot render it: {error}") from error
        except InputError as error:
            raise InputError(f"{chat.origin}: {error}") from error
        if not tokens:
            raise InputError(f"{chat.origin}: {source.path} makes no text of it; give another with --template")
        prompts.append(Prompt(chat.origin, text, tuple(tokens)))
    return prompts, end_of_turn(tokenizer, chosen)


def _conversation(line: bytes, place: str) -> Conversation:
    try:
        record: Any = parse(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise InputError(f'{place}: is no JSON object; a row is {{"messages": [{{"role": …, "content": …}}, …]}}')
    found = checked_chat(None, place, record)
    if isinstance(found, Reject):
        raise InputError(f"{place}: {found.reason}: {found.detail}")
    chat = read_chat(found.text)
    if isinstance(chat.begin, str):
        raise InputError(f"{place}: has a prompt of text, for which there is no template; leave --chat out")
    chat = replace(chat, completion=None)
    if chat.messages[-1]["role"] == "assistant":
        raise InputError(f"{place}: ends with an answer of the assistant; take it out, and the model writes its own")
    return chat
