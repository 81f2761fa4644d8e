"""Pickles as data. Nothing is imported, called or changed: a call becomes a record of its name and arguments.

Only the opcodes are known that `torch.save` and PyTorch Distributed Checkpoint (DCP) need for tensors and their index.
Time and memory grow with the length of the pickle.
"""

import pickletools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Named:
    """A class or function, which is not looked up."""

    name: str  # with its module


@dataclass(eq=False, repr=False)  # what it holds may be deep, and may hold itself
class Made:
    """What a call would have made."""

    name: str  # of what would have been called
    arguments: tuple[Any, ...]
    state: Any = None  # that it would have been given


def read_pickle(data: bytes) -> Any:
    """What `data` holds. Raises ValueError for any other opcode, and for operands of another type than it has there."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # stacks that were there before a mark
    memo: dict[int, Any] = {}

    def made() -> Made:
        function, arguments = popped()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise ValueError("calls what is no name, or with what are no arguments")
        return Made(function.name, arguments)

    def popped(count: int = 2) -> list[Any]:
        items = stack[-count:]
        if len(items) < count:
            raise ValueError("takes more than there is")
        del stack[-count:]
        return items

    try:
        for opcode, argument, _ in pickletools.genops(data):
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "SHORT_BINUNICODE" | "BINUNICODE" | "BINFLOAT":
                    stack.append(argument)
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "EMPTY_TUPLE":
                    stack.append(())
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(tuple(popped(int(opcode.name[-1]))))
                case "MARK":
                    below.append(stack)
                    stack = []
                case "TUPLE" | "APPENDS" | "SETITEMS":
                    items, stack = stack, below.pop()
                    if opcode.name == "TUPLE":
                        stack.append(tuple(items))
                    elif opcode.name == "APPENDS":
                        _list(stack[-1]).extend(items)
                    else:
                        _set(stack[-1], items)
                case "APPEND":
                    target, item = popped()
                    stack.append(_list(target))
                    target.append(item)
                case "SETITEM":
                    items = popped()
                    _set(stack[-1], items)
                case "GLOBAL":
                    stack.append(Named(argument.replace(" ", ".")))
                case "STACK_GLOBAL":
                    module, name = popped()
                    stack.append(Named(f"{module:s}.{name:s}"))
                case "REDUCE" | "NEWOBJ":
                    stack.append(made())
                case "BINPERSID":
                    stack.append(Made("persistent", (popped(1)[0],)))
                case "BUILD":
                    target, state = popped()
                    if not isinstance(target, Made) or target.state is not None:
                        raise ValueError("changes what it has not just made")
                    target.state = state
                    stack.append(target)
                case "STOP":
                    (result,) = stack
                    return result
                case name:
                    raise ValueError(f"has the opcode {name}, which no checkpoint needs")
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"is damaged: {error!r}") from None
    raise ValueError("has no end")


def _list(target: Any) -> list[Any]:
    if not isinstance(target, list):
        raise ValueError("appends to what is no list")
    return target


def _set(target: Any, items: list[Any]) -> None:
    if (
        not isinstance(target, dict)
        or len(items) % 2
        or not all(isinstance(key, str | int | Made) for key in items[::2])
    ):
        raise ValueError("sets items of what is no dictionary, or by keys that are no names")
    target.update(zip(items[::2], items[1::2], strict=True))
