"""Reads YAML as plain dictionaries, lists and values. Any text is read in bounded time and memory.

A part of YAML 1.1: no dates, no numbers in base 60 or 8, no tags of programs. 1e-4 is a number, as in YAML 1.2. Keys
are texts, each once. Merge keys (`<<: *name`) and aliases count as all that they stand for.
"""

import re
import stat
from pathlib import Path
from typing import Any, ClassVar

import yaml

from megalite.base.errors import InputError

MAX_BYTES, MAX_NODES, MAX_DEPTH = 1 << 20, 20_000, 32
NULL, BOOL, INT, FLOAT, STR, MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ["null", "bool", "int", "float", "str", "merge"]
)
NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)")
DECIMAL = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)


def read_mapping(path: Path, most_bytes: int = MAX_BYTES, quoting: bool = True) -> dict[str, Any]:
    """The mapping in the file `path`, of at most `most_bytes`. Raises InputError with the name of the file.

    quoting: the error may repeat words of the file.
    """
    try:
        text = read_text(path, most_bytes)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    try:
        content = parse(text)
    except ValueError as error:
        place = re.match(r"line \d+, column \d+", str(error))
        told = f": {error}" if quoting else f": {place[0]}" if place else ""
        raise InputError(f"{path}: is not valid YAML{told}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path}: must be a mapping, `key: value` lines, at its top level")
    return content


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """The text of a file that is not endless. Raises OSError, and ValueError with what is wrong with the text."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # every rank reads it, so it can be no pipe
        raise ValueError("is no regular file")
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"has more than {most_bytes:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def parse(text: str) -> Any:
    """The content of the YAML `text`. Raises ValueError, which says what is wrong and where."""
    try:
        return yaml.load(text, LimitedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        context = f"{error.context}, " if (error.problem or "").startswith("but ") else ""  # half a sentence
        raise ValueError(f"{where}{context}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from None


class LimitedLoader(yaml.SafeLoader):
    """PyYAML's loader, with limits, and without features that nobody means to use."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = self.nodes = 0
        self.sizes: dict[int, int] = {}  # nodes inside of each complete one, itself included, by its identity

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self.nodes
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.wrong(f"is nested more than {MAX_DEPTH} deep", event.start_mark)
        alias = isinstance(event, yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if alias and id(node) not in self.sizes:
            raise self.wrong("refers to what it is inside of", event.start_mark)
        self.nodes += self.sizes[id(node)] if alias else 1
        if self.nodes > MAX_NODES:
            raise self.wrong(f"has more than {MAX_NODES:,} values", event.start_mark)
        self.sizes.setdefault(id(node), self.nodes - before)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        """A dictionary. A key that is merged in is no duplicate: the mapping's own value wins."""
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong("expected a mapping", node.start_mark)
        seen = set()
        for key, _ in node.value:
            if key.tag not in (STR, MERGE):
                raise self.wrong("a key must be text; put it in quotes", key.start_mark)
            if key.value in seen and key.tag != MERGE:
                raise self.wrong(f"found duplicate key {key.value:.80}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def text(self, node: Any) -> str:
        """A string, if it has only characters that files and terminals can have."""
        value = str(self.construct_scalar(node))
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            raise self.wrong("a text cannot have this character", node.start_mark)
        return value

    def whole(self, node: Any) -> int:
        digits = self.construct_scalar(node).replace("_", "")
        if not NUMBER.fullmatch(digits):
            raise self.wrong(f"{digits:.80} is no whole number", node.start_mark)
        if len(digits) > 100:
            raise self.wrong(f"a whole number of {len(digits):,} digits", node.start_mark)
        return int(digits, 0)

    def decimal(self, node: Any) -> float:
        digits = self.construct_scalar(node).replace("_", "").lower()
        if not DECIMAL.fullmatch(digits) and not NUMBER.fullmatch(digits):
            raise self.wrong(f"{digits:.80} is no number", node.start_mark)
        return float(re.sub(r"\.(?=inf|nan)", "", digits))

    def truth(self, node: Any) -> bool:
        word = self.construct_scalar(node).lower()
        if word not in self.bool_values:
            raise self.wrong(f"{word:.80} is neither true nor false", node.start_mark)
        return self.bool_values[word]

    def refuse(self, node: Any) -> Any:
        raise self.wrong(f"the tag {node.tag:.80} has no meaning here", node.start_mark)

    def wrong(self, what: str, mark: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=what, problem_mark=mark)


for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items():
    LimitedLoader.yaml_implicit_resolvers[first] = [entry for entry in entries if entry[0] in (NULL, BOOL, MERGE)]
LimitedLoader.add_implicit_resolver(INT, re.compile(f"(?:{NUMBER.pattern})$"), list("-+0123456789"))
LimitedLoader.add_implicit_resolver(FLOAT, re.compile(f"(?:{DECIMAL.pattern})$"), list("-+0123456789."))
for tag, make in (
    (NULL, yaml.SafeLoader.construct_yaml_null),
    (BOOL, LimitedLoader.truth),
    (INT, LimitedLoader.whole),
    (FLOAT, LimitedLoader.decimal),
    (STR, LimitedLoader.text),
    ("tag:yaml.org,2002:seq", yaml.SafeLoader.construct_yaml_seq),
    ("tag:yaml.org,2002:map", yaml.SafeLoader.construct_yaml_map),
    (None, LimitedLoader.refuse),
):
    LimitedLoader.add_constructor(tag, make)
