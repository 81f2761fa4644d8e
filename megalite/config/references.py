"""References in values, as OmegaConf has them: `${model.width}` to another value, `${oc.env:HOME}` to the environment.

They are filled in here, each value once, in a time that grows with the number of references and not with the size of
what they refer to. A reference can run nothing, and the result is bounded.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.base.errors import Problem
from megalite.config.convert import UNRESOLVED_VALUE, inside

KEY = r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*"  # model.layers, data.train[0].path
START = re.compile(r"(\\*)\$\{")  # after an odd number of backslashes it is plain text
REFERENCE = re.compile(rf"\$\{{(?:oc\.env:(?P<name>\w+)(?P<default>,[^,${{}}\\]*)?|(?P<key>{KEY}))\}}")
MAX_CHARACTERS = 1 << 20  # characters of all values, once references are filled in
CHARACTERS_PER_VALUE = 50  # characters that every value counts as, beside those that it has
MAX_STEPS = 32  # from the top to a value, into sections and along references
LISTED_KEYS = 4  # keys of a chain in a message


def fill_in(plain: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A configuration, as nested dictionaries and lists, with its references filled in.

    Returned with it are the problems of references; a value that has such a reference is UNRESOLVED_VALUE.
    """
    filling = _Filling(plain)
    filled = filling.at("", plain)
    if filled.size > MAX_CHARACTERS and not filling.problems:
        rule = f"has more than {MAX_CHARACTERS:,} characters once references are filled in"
        filling.problems.append(Problem("the configuration", rule))
    return (plain if filling.problems and filled.size > MAX_CHARACTERS else filled.value), filling.problems


@dataclass(frozen=True)
class _Filled:
    value: Any
    size: int  # in characters; what is referred to counts each time
    height: int = 0  # steps that it leads on


class _Filling:
    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain
        self.problems: list[Problem] = []
        self.done: dict[str, _Filled] = {}  # by key
        self.open: list[str] = []  # keys that lead to the value at hand
        self.chain: list[str] = []  # open keys that lead on by a reference
        self.too_far = False

    def at(self, key: str, value: Any) -> _Filled:
        """The value of a key."""
        found = self.done.get(key)
        if len(self.open) + (found.height if found else 0) > MAX_STEPS:
            return self._too_far(key)
        if found is None:
            self.open.append(key)
            found = self.done[key] = self._text(key, value) if isinstance(value, str) else self._other(key, value)
            self.open.pop()
        return found

    def _other(self, key: str, value: Any) -> _Filled:
        if not isinstance(value, dict | list):
            return _Filled(value, CHARACTERS_PER_VALUE)
        parts = [self.at(name, inner) for name, inner in inside(value, key)]
        inner = [part.value for part in parts]
        filled = dict(zip(value, inner, strict=True)) if isinstance(value, dict) else inner
        height = max((part.height + 1 for part in parts), default=0)
        return _Filled(filled, CHARACTERS_PER_VALUE + sum(part.size for part in parts), height)

    def _text(self, key: str, text: str) -> _Filled:
        if (match := REFERENCE.fullmatch(text)) is not None:
            whole = self._referred(key, text, match)  # the value itself, of whatever type
            return _Filled(whole.value, whole.size, whole.height + 1)
        parts = list(self._parts(key, text))
        size, height = (
            CHARACTERS_PER_VALUE + sum(part.size for part in parts),
            max((part.height for part in parts), default=0),
        )
        if size > MAX_CHARACTERS or any(part.value is UNRESOLVED_VALUE for part in parts):
            return _Filled(UNRESOLVED_VALUE, size, height)
        return _Filled("".join(str(part.value) for part in parts), size, height)

    def _parts(self, key: str, text: str) -> Iterator[_Filled]:
        """The parts of a text: what is between references, and the values of these."""
        position = 0
        for start in START.finditer(text):
            slashes = len(start[1])
            before = text[position : start.start()] + "\\" * (slashes // 2)
            position = start.end()
            if slashes % 2:
                yield _Filled(before + "${", len(before) + 2)
                continue
            yield _Filled(before, len(before))
            match = REFERENCE.match(text, position - 2)
            if match is None:
                fix = r"write ${section.key}, ${oc.env:NAME}, or \${ for a ${"
                yield self._wrong(key, text, "has a reference that cannot be read", fix)
                continue
            part, position = self._referred(key, text, match), match.end()
            if isinstance(part.value, dict | list):
                yield self._wrong(key, text, f"refers to {match['key']} inside of a text", "name a key with one value")
            else:
                yield _Filled(part.value, len(str(part.value)), part.height + 1)
        yield _Filled(text[position:], len(text) - position)

    def _referred(self, key: str, text: str, match: re.Match[str]) -> _Filled:
        if match["name"] is not None:
            return self._environment(key, text, match)
        other = match["key"]
        if other in self.open:
            circle = " refers to ".join([*self.open[self.open.index(other) :], other])
            return self._wrong(key, text, "cannot be resolved", circle)
        try:
            target: Any = self.plain
            for step in re.findall(r"\w+", other):
                target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return self._wrong(key, text, f"refers to {other}, which is not there", "name a key of the configuration")
        if target == "???":
            return self._wrong(key, text, f"refers to {other}, which has no value yet", f"set {other}")
        self.chain.append(key)
        found = self.at(other, target)
        self.chain.pop()
        return found

    def _environment(self, key: str, text: str, match: re.Match[str]) -> _Filled:
        name, default = match["name"], match["default"]
        found: str | None = os.environ.get(name)
        if found is None and default is not None:
            word = default[1:].strip()
            found = word[1:-1] if re.fullmatch(r"'.*'|\".*\"", word) else None if word == "null" else word
        elif found is None:
            fix = f"set it, or give a default: ${{oc.env:{name},DEFAULT}}"
            return self._wrong(key, text, f"refers to the environment variable {name}, which is not set", fix)
        return _Filled(found, CHARACTERS_PER_VALUE + len(found or ""))

    def _wrong(self, key: str, text: str, rule: str, fix: str) -> _Filled:
        self.problems.append(Problem(key, rule, fix, text))
        return _Filled(UNRESOLVED_VALUE, 0)

    def _too_far(self, key: str) -> _Filled:
        if not self.too_far:  # one chain has many that lead too far
            shown = " refers to ".join([*self.chain, key][:LISTED_KEYS])
            rule = f"leads to a value in more than {MAX_STEPS} steps, into sections and along references"
            fix = f"refer to the value itself; {shown} and so on" if self.chain else "use less nesting"
            self.problems.append(Problem(self.chain[0] if self.chain else key, rule, fix))
        self.too_far = True
        return _Filled(UNRESOLVED_VALUE, 0)
