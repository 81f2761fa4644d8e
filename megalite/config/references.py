"""References in values: `${model.width}` to another value, `${oc.env:HOME}` to the environment.

OmegaConf fills them in. Before it does, all are looked at here: none is unreadable, missing or circular, none runs
anything (of OmegaConf's resolvers only `oc.env` can be reached), and the result is not endless.
"""

import os
import re
from typing import Any

from megalite.config.convert import inside
from megalite.config.errors import Problem

KEY = r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*"  # model.layers, data.train[0].path
START = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
REFERENCE = re.compile(rf"\$\{{(?:oc\.env:(?P<name>\w+)(?P<default>,[^${{}}\\]*)?|(?P<key>{KEY}))\}}")
LONGEST = 1 << 16  # characters of all values, once references are filled in


def check_references(plain: dict[str, Any]) -> list[Problem]:
    """What is wrong with the references of a configuration, as nested dictionaries and lists."""
    return _Walk(plain).problems


class _Walk:
    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain
        self.problems: list[Problem] = []
        self.lengths: dict[str, int] = {}  # by key, references filled in
        self.open: list[str] = []  # keys being measured
        if not self.length("", plain) <= LONGEST and not self.problems:
            rule = f"has more than {LONGEST:,} characters once references are filled in"
            self.problems.append(Problem("the configuration", rule))

    def length(self, key: str, value: Any) -> int:
        """Characters and items of a value, references filled in."""
        if key not in self.lengths:
            self.open.append(key)
            self.lengths[key] = self._measure(key, value)
            self.open.pop()
        return self.lengths[key]

    def _measure(self, key: str, value: Any) -> int:
        if not isinstance(value, str):
            return 1 + sum(self.length(name, inner) for name, inner in inside(value, key))
        return len(value) + sum(self._referred(key, value, start.end() - 2) for start in START.finditer(value))

    def _referred(self, key: str, value: str, at: int) -> int:
        def wrong(rule: str, fix: str) -> int:
            self.problems.append(Problem(key, rule, fix, value))
            return 0

        match = REFERENCE.match(value, at)
        if match is None:
            return wrong(
                "has a reference that cannot be read", r"write ${section.key}, ${oc.env:NAME}, or \${ for a ${"
            )
        name, other = match["name"], match["key"]
        if name is not None:
            if name not in os.environ and match["default"] is None:
                fix = f"set it, or give a default: ${{oc.env:{name},DEFAULT}}"
                return wrong(f"refers to the environment variable {name}, which is not set", fix)
            return len(os.environ.get(name, ""))
        if other in self.open:
            circle = " refers to ".join([*self.open[self.open.index(other) :], other])
            return wrong("cannot be resolved", circle)
        try:
            target: Any = self.plain
            for step in re.findall(r"\w+", other):
                target = target[int(step)] if isinstance(target, list) else target[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return wrong(f"refers to {other}, which is not there", "name a key of the configuration")
        if target == "???":
            return wrong(f"refers to {other}, which has no value yet", f"set {other}")
        return self.length(other, target)
