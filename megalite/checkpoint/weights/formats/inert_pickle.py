"""Reads pickles as data. Nothing is imported, called or changed: a call becomes a record of its name and
arguments.

Only the opcodes are known that `torch.save` and PyTorch Distributed Checkpoint (DCP) need for tensors and their index.
Time and memory grow only with the length of the pickle, even if it was written to do harm.
"""

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_NAME_LENGTH = 200  # characters of a module's name, and of a name in it
MAX_KEY = 1 << 31  # whole number as a key: larger ones can be chosen to have equal hashes


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a class or function, which is not looked up."""

    name: str  # with its module


@dataclass(eq=False, repr=False, slots=True)  # its contents may be nested deep, and may contain it
class Made:
    """Stands for the result of a call that was not made."""

    name: str  # function that would have been called
    arguments: tuple[Any, ...]
    state: Any = None  # with which the result would have been filled

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Ordered(dict[Any, Any]):
    """Stands for an OrderedDict. Its attributes, such as the `_metadata` of a module's state, are left out."""


def read_pickle(data: bytes) -> Any:
    """The value in the pickle `data`. Raises ValueError for unknown opcodes, and for operands of a wrong type."""
    machine = _Machine()
    try:
        for name, argument in _opcodes(data):
            if name == "STOP":
                if len(machine.stack) != 1:
                    raise ValueError("ends with more or less than one value")
                return machine.stack[0]
            if (apply := OPCODES.get(name)) is None:
                raise ValueError(f"has the opcode {name}, which no checkpoint needs")
            apply(machine, argument)
    except (IndexError, KeyError) as error:  # an empty stack, no mark, or no such number in the memo
        raise ValueError(f"is damaged: {error!r}") from None
    raise ValueError("has no end")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """The name and argument of every opcode."""
    try:
        yield from ((opcode.name, argument) for opcode, argument, _ in pickletools.genops(data))
    except ValueError as error:
        raise ValueError(f"is no pickle: {error}") from None


class _Machine:
    """The state of reading a pickle. Every method runs an opcode, or a kind of opcodes, and takes its argument."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks from before each mark
        self._memo: dict[int, Any] = {}

    def skip(self, _: Any) -> None:
        pass

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def get(self, number: int) -> None:
        self.push(self._memo[number])

    def put(self, number: int) -> None:
        self._memo[number] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.put(len(self._memo))

    def mark(self, _: Any) -> None:
        self._below.append(self.stack)
        self.stack = []

    def tuple_of(self, count: int) -> None:
        self.push(tuple(self._pop(count)))

    def tuple_from_mark(self, _: Any) -> None:
        items = self._pop_to_mark()
        self.push(tuple(items))

    def append(self, _: Any) -> None:
        items = self._pop(1)
        _extend(self.stack[-1], items)

    def appends(self, _: Any) -> None:
        items = self._pop_to_mark()
        _extend(self.stack[-1], items)

    def set_item(self, _: Any) -> None:
        items = self._pop(2)
        _set(self.stack[-1], items)

    def set_items(self, _: Any) -> None:
        items = self._pop_to_mark()
        _set(self.stack[-1], items)

    def global_name(self, words: str) -> None:
        self._name(*words.split(" ", 1))

    def stacked_name(self, _: Any) -> None:
        self._name(*self._pop(2))

    def call(self, _: Any) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise ValueError("calls what is no name, or with what are no arguments")
        ordered = function.name == "collections.OrderedDict" and not arguments
        self.push(Ordered() if ordered else Made(function.name, arguments))

    def persistent(self, _: Any) -> None:
        self.push(Made("persistent", tuple(self._pop(1))))

    def build(self, _: Any) -> None:
        target, state = self._pop(2)
        if not isinstance(target, Ordered):
            if not isinstance(target, Made) or target.state is not None:
                raise ValueError("changes what it has not just made")
            target.state = state
        self.push(target)

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count:
            raise ValueError("takes more than there is")
        del self.stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _name(self, module: Any, name: Any) -> None:
        # Both may be long texts of the memo, and every opcode, a single byte, would join them again.
        if not all(isinstance(part, str) and len(part) <= MAX_NAME_LENGTH for part in (module, name)):
            raise ValueError(f"names a class by what is no text of at most {MAX_NAME_LENGTH} characters")
        self.push(Named(f"{module}.{name}"))


def _pushing(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


def _taking(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.tuple_of(count)


OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.skip),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _Machine.push),
    "NONE": _pushing(None),
    "NEWTRUE": _pushing(True),
    "NEWFALSE": _pushing(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": _pushing(()),
    **{f"TUPLE{count}": _taking(count) for count in (1, 2, 3)},
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_from_mark,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stacked_name,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "BINPERSID": _Machine.persistent,
    "BUILD": _Machine.build,
}


def _extend(target: Any, items: list[Any]) -> None:
    if not isinstance(target, list):
        raise ValueError("appends to what is no list")
    target.extend(items)


def _set(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if not isinstance(target, dict) or len(items) % 2 or not all(map(_is_key, keys)):
        raise ValueError("sets items of what is no dictionary, or by keys that are no names")
    target.update(zip(keys, items[1::2], strict=True))


def _is_key(value: Any) -> bool:
    """Return whether the hash of `value` is quick to compute and cannot be chosen, unlike that of a tuple or float."""
    return isinstance(value, str | Made) or (type(value) is int and -MAX_KEY <= value < MAX_KEY)
