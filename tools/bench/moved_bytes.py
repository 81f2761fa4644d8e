"""Bytes that operations read and write beside matrix products, by their names."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm")
NOTHING = (*PRODUCTS, "empty", "new_empty", "empty_like", "new_empty_strided", "_unsafe_view")


class MovedBytes(TorchDispatchMode):
    """Counts each tensor of every operation once, but for views; twice what it changes; of products in place, what they
    add to.

    Counts operations too, but for views and for what only allocates. counts: decides by the name of an operation and
    one of its tensors whether that is counted.
    """

    def __init__(self, counts: Callable[[str, Tensor], bool]) -> None:
        super().__init__()
        self.counts, self.bytes, self.operations = counts, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if name in PRODUCTS or (name not in NOTHING and not func.is_view):
            self.operations[name] += 1
        if name not in NOTHING and not func.is_view:
            given = args[0] if name == "addmm_" else (args, kwargs, result, changed(func, args))
            leaves = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            self.bytes[name] += sum(leaf.nbytes for leaf in leaves if self.counts(name, leaf))
        return result


def changed(func: Any, args: Any) -> list[Any]:
    """The arguments that an operation changes and does not return, so that they are no result."""
    schema = func._schema
    if schema.returns:
        return []
    return [
        arg
        for arg, entry in zip(args, schema.arguments, strict=False)
        if entry.alias_info and entry.alias_info.is_write
    ]
