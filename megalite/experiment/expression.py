"""Arithmetic in experiment files: `pow2(0.58 * D**0.571 / sequence_length)`, `batch.global == 64 and optim.lr > 8e-3`.

An expression is parsed by Python and walked through here. Only the nodes that are listed below have a meaning: numbers,
texts to compare with, names, arithmetic, comparisons, and/or/not, and calls of FUNCTIONS. Nothing else is run, and no
number grows beyond a float.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Value = int | float | bool | str | None
Lookup = Callable[[str], Any]  # value of a name; raises KeyError for one that is not known

MAX_LENGTH = 500  # characters
MAX_NODES = 200
MAX_BITS = 256  # bits of a whole number; a larger one becomes a float
NAME = re.compile(r"(?P<text>'[^']*'|\"[^\"]*\")|(?<![\w.])(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)")
ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ORDER: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
EQUALITY: dict[type[ast.AST], Callable[[Any, Any], bool]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}


class ExpressionError(ValueError):
    """A fault of an expression, in words."""


def pow2(number: float) -> int | float:
    """The power of two that is nearest to a positive number, in ratio: 1.5 becomes 2, and 1.4 becomes 1."""
    return _power(2, round(math.log2(number)))


FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {  # with the least and the largest number of arguments
    "min": (min, 1, 20),
    "max": (max, 1, 20),
    "log": (math.log, 1, 1),
    "log2": (math.log2, 1, 1),
    "exp": (math.exp, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "pow2": (pow2, 1, 1),
    "round": (round, 1, 1),
}


@dataclass(frozen=True)
class Expression:
    """An expression that has been checked; `names` are those that it looks up."""

    text: str
    tree: ast.expr
    spelled: dict[str, str]  # dotted names, which may have words of Python, by the names that stand for them in `tree`
    names: frozenset[str]

    @staticmethod
    def parse(text: str) -> "Expression":
        """Raises ExpressionError for a text that is no expression, or is one that could do harm."""
        if len(text) > MAX_LENGTH:
            raise ExpressionError(f"has {len(text):,} characters; at most {MAX_LENGTH} are allowed")
        spelled: dict[str, str] = {}

        def rename(match: re.Match[str]) -> str:
            if match["text"] is not None:
                return match["text"]
            stand_in = f"dotted_{len(spelled)}_"
            spelled[stand_in] = match["name"]
            return stand_in

        try:
            tree = ast.parse(NAME.sub(rename, text.strip()), mode="eval").body
        except SyntaxError as error:
            raise ExpressionError(f"is no expression: {error.msg}") from None
        except (ValueError, MemoryError, RecursionError):  # a null byte; nesting without end
            raise ExpressionError("is no expression: it cannot be read") from None
        nodes = list(ast.walk(tree))
        if len(nodes) > MAX_NODES:
            raise ExpressionError(f"has {len(nodes)} parts; at most {MAX_NODES} are allowed")
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            _allow(node, spelled, called)
        names = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
        return Expression(text, tree, spelled, frozenset(spelled.get(name, name) for name in names))

    def value(self, lookup: Lookup) -> Value:
        """The value. Raises ExpressionError for an unknown name, and for arithmetic that has no finite result."""

        def named(name: str) -> Any:
            name = self.spelled.get(name, name)
            try:
                return lookup(name)
            except KeyError:
                raise ExpressionError(f"has the name {name}, which is not known here") from None

        try:
            return _bounded(_value(self.tree, named))
        except ZeroDivisionError:
            raise ExpressionError("divides by zero") from None
        except OverflowError:
            raise ExpressionError("has a number that is too large") from None
        except (TypeError, ValueError) as error:
            if isinstance(error, ExpressionError):
                raise
            raise ExpressionError(f"cannot be computed: {error}") from None

    def number(self, lookup: Lookup) -> int | float:
        """The value, which must be a number."""
        value = self.value(lookup)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ExpressionError(f"comes to {value!r}, which is no number")
        return value

    def holds(self, lookup: Lookup) -> bool:
        """Return whether the expression, which must be a condition, is true."""
        value = self.value(lookup)
        if not isinstance(value, bool):
            raise ExpressionError(f"comes to {value!r}, which is neither true nor false; compare it with something")
        return value


def _allow(node: ast.AST, spelled: dict[str, str], called: set[int]) -> None:
    """Raises ExpressionError for a node that has no meaning here."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return
        case ast.Call(func=ast.Name(id=name), keywords=[], args=arguments) if name in FUNCTIONS:
            _, least, most = FUNCTIONS[name]
            if least <= len(arguments) <= most and not any(isinstance(each, ast.Starred) for each in arguments):
                return
            raise ExpressionError(
                f"gives {name} {len(arguments)} values; it takes {least}{' or more' * (most > least)}"
            )
        case ast.Name(id=name):
            if id(node) not in called and name in FUNCTIONS:
                raise ExpressionError(f"has {name} without its value; write {name}(…)")
            return
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.Load():
            return
        case ast.Pow() | ast.UAdd() | ast.USub() | ast.Not() | ast.And() | ast.Or():
            return
        case _ if type(node) in ARITHMETIC | ORDER | EQUALITY:
            return
    known = "numbers, names, + - * / **, comparisons, and, or, not, and " + ", ".join(FUNCTIONS)
    raise ExpressionError(f"has a part of the kind {type(node).__name__}, which is not allowed; there are {known}")


def _value(node: ast.expr, named: Lookup) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return named(name)
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_truth(_value(part, named)) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_truth(_value(part, named)) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _truth(_value(part, named))
        case ast.UnaryOp(op=sign, operand=part):
            value = _number(_value(part, named))
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=sign, right=right):
            a, b = _number(_value(left, named)), _number(_value(right, named))
            return _bounded(_power(a, b) if isinstance(sign, ast.Pow) else ARITHMETIC[type(sign)](a, b))
        case ast.Compare(left=left, ops=signs, comparators=others):
            values = [_value(part, named) for part in (left, *others)]
            return all(map(_compare, signs, values, values[1:]))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _bounded(FUNCTIONS[name][0](*(_number(_value(part, named)) for part in arguments)))
    raise ExpressionError(f"has a part of the kind {type(node).__name__}")  # _allow lets none through


def _compare(sign: ast.cmpop, a: Any, b: Any) -> bool:
    if type(sign) in EQUALITY:
        return bool(EQUALITY[type(sign)](a, b))
    return bool(ORDER[type(sign)](_number(a), _number(b)))


def _power(base: float, exponent: float) -> int | float:
    """Compute a power: exactly for whole numbers of a moderate size; else as a float, for which it may be too large."""
    whole = isinstance(base, int) and isinstance(exponent, int) and 0 <= exponent <= MAX_BITS
    if whole and int(base).bit_length() * exponent <= MAX_BITS:
        return int(base**exponent)
    return math.pow(base, exponent)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"counts with {value!r}, which is no number")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"takes {value!r} for true or false; compare it with something")
    return value


def _bounded(value: Any) -> Any:
    """The value; a huge whole number becomes a float. Raises ExpressionError for one that is not finite."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError("has a result that is not a finite number")
    return value
