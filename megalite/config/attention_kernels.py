"""The kernel of attention, by a table of what each of them can do. Imports no torch.

| kernel      | what runs |
|-------------|-----------|
| `flash3`    | FlashAttention 3, of the package that has `flash_attn_interface` |
| `flash4`    | FlashAttention 4, of the package `flash-attn-4` |
| `cudnn`     | cuDNN's, of whole causal sequences |
| `flash`     | FlashAttention 2, which PyTorch brings; on a CPU, PyTorch's own kernel of that kind |
| `efficient` | PyTorch's memory-efficient attention, of whole causal sequences, in fp32 too |
| `flex`      | the kernel that PyTorch's FlexAttention generates, with capped scores too, of whole sequences |
| `math`      | plain PyTorch, some rows of scores at a time, anywhere and anything (`parallel/explicit`) |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from megalite.base.errors import counted
from megalite.config.layers import Heads, layer_kinds
from megalite.config.schema import AttentionKernel, Config

Kernel = Literal["flash3", "flash4", "cudnn", "flash", "efficient", "flex", "math"]
ORDER: tuple[Kernel, ...] = get_args(Kernel)  # the first that can is chosen
PADDING: tuple[Kernel, ...] = ("flash3", "flash4", "flash")  # they take values as wide as keys: others are padded
WIDEST = 256  # features of a head, for any of FlashAttention's


@dataclass(frozen=True)
class Machine:
    """Facts of a GPU, and of what is installed beside it.

    packages: the kernels whose packages are there. cudnn: its version, 10,000 · major + 100 · minor + patch; 0: none.
    refused: kernels that did not run there, and what they said.
    """

    capability: tuple[int, int]
    packages: frozenset[Kernel] = frozenset()
    cudnn: int = 91900
    refused: Mapping[Kernel, str] = field(default_factory=dict, hash=False)


# Whatever GPU a run will be on, a kernel that this one refuses cannot be used.
ANY_GPU = Machine((9, 0), frozenset(ORDER))


@dataclass(frozen=True)
class Need:
    """Attention of layers of one kind.

    ring: keys and values come from other ranks. documents, window, capped, sinks: attention stays inside of documents,
    in windows shorter than the sequence, has capped scores, has sinks. width, value_width: of a head's keys and of its
    values.
    """

    precision: str = "bf16"
    ring: bool = False
    documents: bool = False
    window: bool = False
    capped: bool = False
    width: int = 128
    value_width: int = 128
    deterministic: bool = False
    sinks: bool = False

    @property
    def plain(self) -> bool:
        """Flag: attention is causal over whole sequences, and no more."""
        return not (self.ring or self.documents or self.window or self.capped or self.sinks)


class Rule(NamedTuple):
    """A rule of a kernel, as the end of a sentence about it, and whether a need breaks it."""

    text: str
    broken: Callable[[Need, Machine], bool]


class Choice(NamedTuple):
    """A kernel and why it is this one."""

    kernel: Kernel
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.reason})"


HALF = Rule("needs bf16", lambda need, _: need.precision != "bf16")
UNCAPPED = Rule("has no cap on scores", lambda need, _: need.capped)
SINKLESS = Rule("does not return the log-sum-exp that sinks need", lambda need, _: need.sinks)
UNMASKED = Rule("knows no documents and no windows", lambda need, _: need.documents or need.window)
ALONE = Rule("needs whole sequences on a rank, with no ring", lambda need, _: need.ring)
AMPERE = Rule("needs compute capability 8.0", lambda _, gpu: gpu.capability < (8, 0))
PADS = Rule("pads values to the width of keys", lambda need, _: need.plain and need.width != need.value_width)
EIGHTS = Rule("needs heads of a multiple of 8", lambda need, _: bool(need.width % 8 or need.value_width % 8))
NARROW = Rule(f"needs heads of at most {WIDEST}", lambda need, _: max(need.width, need.value_width) > WIDEST)
REPEATED = Rule("does not repeat itself to the bit", lambda need, _: need.deterministic)
_FLASH = (HALF, UNCAPPED, AMPERE, NARROW)

RULES: Mapping[Kernel, tuple[Rule, ...]] = {
    "flash3": (
        *_FLASH,
        EIGHTS,
        REPEATED,
        Rule("needs compute capability 9.0", lambda _, gpu: gpu.capability != (9, 0)),
        Rule("needs a package with flash_attn_interface", lambda _, gpu: "flash3" not in gpu.packages),
    ),
    "flash4": (
        *_FLASH,
        EIGHTS,
        REPEATED,
        Rule("needs heads of at most 128", lambda need, _: need.width > 128),
        Rule("needs compute capability 9.0 or 10", lambda _, gpu: gpu.capability[0] not in (9, 10)),
        Rule("needs the package flash-attn-4", lambda _, gpu: "flash4" not in gpu.packages),
    ),
    "cudnn": (
        HALF,
        UNCAPPED,
        SINKLESS,
        UNMASKED,
        ALONE,
        EIGHTS,
        AMPERE,
        REPEATED,
        Rule(
            f"needs heads of at most 128, or {WIDEST} on compute capability 9.0",
            lambda need, gpu: max(need.width, need.value_width) > (WIDEST if gpu.capability == (9, 0) else 128),
        ),
        Rule("needs cuDNN 9", lambda _, gpu: gpu.cudnn < 90000),
    ),
    "flash": (
        *_FLASH,
        Rule(
            "needs heads of a multiple of 8 but for whole causal sequences",
            lambda n, _: not n.plain and n.width % 8 > 0,
        ),
        Rule(
            "has no backward for heads of 193 to 224 on this GPU",
            lambda need, gpu: 192 < need.width <= 224 and gpu.capability in ((8, 6), (8, 9), (12, 0), (12, 1)),
        ),
    ),
    "efficient": (
        UNCAPPED,
        SINKLESS,
        UNMASKED,
        ALONE,
        Rule("needs bf16 or fp32", lambda need, _: need.precision == "fp64"),
        Rule(
            "needs heads of a multiple of 8, or of 4 in fp32",
            lambda n, _: n.width % (4 if n.precision == "fp32" else 8) > 0,
        ),
        Rule("needs compute capability 8.0 for bf16", lambda n, gpu: n.precision == "bf16" and gpu.capability < (8, 0)),
    ),
    "flex": (ALONE, Rule("needs bf16 or fp32", lambda need, _: need.precision == "fp64")),
    "math": (),
}
PREFERENCES: Mapping[Kernel, tuple[Rule, ...]] = {  # further rules where nobody has asked for the kernel
    "flash3": (PADS,),
    "flash4": (
        PADS,
        Rule("is for compute capability 10", lambda _, gpu: gpu.capability[0] < 10),
    ),
    "cudnn": (
        Rule(
            "is faster on compute capability 9.0, 10.0 and 10.3 only",
            lambda _, gpu: gpu.capability not in ((9, 0), (10, 0), (10, 3)),
        ),
        Rule("before 9.15.1 is wrong for some lengths", lambda _, gpu: gpu.cudnn <= 91500),
    ),
    "flex": (Rule("is for capped scores", lambda need, _: not need.capped),),
}
ON_CPU = Rule("needs a CUDA device", lambda *_: True)


@lru_cache(maxsize=1024)  # a search of layouts asks thousands of times
def choose(asked: AttentionKernel, need: Need, gpu: Machine | None) -> Choice:
    """The kernel for `need`, where `kernels.attention` is `asked`. gpu: None for a CPU.

    Raises ValueError, with the rule as its text, where the kernel that is asked for cannot be used.
    """
    if asked != "auto":
        rule = broken(asked, need, gpu)
        if rule is not None:
            raise ValueError(rule.text)
        return Choice(asked, "as kernels.attention asks")
    against: list[str] = []
    for kernel in ORDER:
        rule = broken(kernel, need, gpu) or _first(PREFERENCES.get(kernel, ()), need, gpu)
        if rule is None:
            return Choice(kernel, "; ".join(against) or ("on a CPU" if gpu is None else "the first of the table"))
        if rule is not ON_CPU:
            against.append(f"{kernel} {rule.text}")
    raise AssertionError("math can do anything")


def broken(kernel: Kernel, need: Need, gpu: Machine | None) -> Rule | None:
    """The first rule of `kernel` that `need` breaks; None: it can be used. gpu: None for a CPU."""
    if gpu is None:
        can = kernel == "math" or (kernel == "flash" and not need.capped)
        return None if can else UNCAPPED if kernel == "flash" else ON_CPU
    if kernel in gpu.refused:
        return Rule(f"does not run here: {gpu.refused[kernel]}", lambda *_: True)
    return _first(RULES[kernel], need, gpu)


def _first(rules: tuple[Rule, ...], need: Need, gpu: Machine | None) -> Rule | None:
    return None if gpu is None else next((rule for rule in rules if rule.broken(need, gpu)), None)


def need_of(config: Config, heads: Heads) -> Need:
    """The attention of layers with `heads`, on every rank of `config`."""
    context, scores = config.parallel.context, heads.scores
    return Need(
        precision=config.train.dtype,
        ring=config.parallel.cp > 1 and context.method != "ulysses",
        documents=config.data.mask_documents,
        window=scores.window_in(config.model.sequence_length) is not None,
        capped=scores.softcap is not None,
        width=heads.width,
        value_width=heads.value_width,
        deterministic=config.train.deterministic,
        sinks=scores.sinks,
    )


def attention_heads(config: Config) -> list[Heads]:
    """The heads of every kind of attention of a model's layers."""
    return list(dict.fromkeys(kind.attention.heads for kind in layer_kinds(config.model)))


def kernel_lines(config: Config, choices: Iterable[Choice]) -> list[str]:
    """A line for each kind of attention with its kernel; kinds of one kernel, as usual, are one line.

    choices: in the order of `attention_heads`.
    """
    layers = [kind.attention.heads.scores.window for kind in layer_kinds(config.model)]
    lines: dict[Choice, list[str]] = {}
    for heads, choice in zip(attention_heads(config), choices, strict=True):
        window = heads.scores.window
        kind = "full attention" if window is None else f"windows of {window:,}"
        lines.setdefault(choice, []).append(f"{counted(layers.count(window), 'layer')} of {kind}")
    if len(lines) == 1:
        return [str(choice) for choice in lines]
    return [f"{choice} in {' and '.join(kinds)}" for choice, kinds in lines.items()]


def planned_kernel(asked: AttentionKernel, need: Need, gpu: Machine | None) -> Kernel:
    """The kernel that a run takes on `gpu`, None for a CPU; where one is asked for, that, whatever there is."""
    return choose("auto", need, gpu).kernel if asked == "auto" else asked
