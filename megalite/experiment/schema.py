"""Every key of an experiment file: its type, its default and what it means. Rules between keys are in `read`."""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["sweep", "ladder", "systems"]
Size = Literal["total", "with_head", "non_embedding"]
Method = Literal["approach3", "approach1", "approach2", "kaplan"]


@dataclass
class About:
    name: str = "???"
    kind: Kind = "sweep"
    base: str | list[str] = "???"  # run configurations that every run starts from, relative to the experiment file
    dir: str = "experiments"  # the folder of the experiment is made inside: {dir}/{name}
    seeds: list[int] = field(default_factory=lambda: [0])  # run.seed; every setting is run with each


@dataclass
class Random:
    """Settings drawn at random."""

    over: dict[str, Any] = field(default_factory=dict)  # a list to choose from, {log2: [a, b]} or {uniform: [a, b]}
    count: int = 10
    seed: int = 0


@dataclass
class Halving:
    """Successive halving: all settings train for few steps, the best share of them for more, and so on."""

    steps: list[int] = field(default_factory=list)  # train.steps of each round, ascending
    factor: int = 3  # one of so many goes on to the next round
    metric: Literal["loss_valid", "loss_train"] = "loss_valid"


@dataclass
class Sizes:
    """Definitions of N, each one of three counts of parameters."""

    fit: Size = "with_head"  # in fits, in tokens_per_parameter and in expressions
    report: list[Size] = field(default_factory=lambda: ["total", "non_embedding"])  # fitted beside it


@dataclass
class Fit:
    """Settings for fitting laws to the results."""

    method: Method = "approach3"  # whose predictions count
    delta: float = 1e-3  # where Huber's loss becomes linear, in ln(loss)
    min_steps: int = 0  # runs with fewer are left out
    drop: int | list[str] = 0  # number of runs with the highest losses that are left out; or those runs by id or slug
    bootstrap: int = 1000  # draws of runs, for intervals


@dataclass
class Holdout:
    """Runs that no fit sees."""

    rungs: list[str] = field(default_factory=list)  # their losses are predicted and compared


@dataclass
class Trunk:
    """Budgets of one rung share a run: the longest one, from which the others branch off to decay."""

    schedule: Literal["wsd"] = "wsd"
    decay: float = 0.2  # share of the steps of a budget in which its rate decays


@dataclass
class Measure:
    """Steps and runs that are timed in experiments of the kind systems."""

    warmup: int = 5  # steps that tell no speed
    steps: int = 20
    repeats: int = 3  # runs of the same layout, which differ in run.seed


@dataclass
class Launch:
    kind: Literal["local", "slurm"] = "local"
    parallel: int = 1  # runs at a time; under Slurm, tasks of an array at a time
    gpus: int | None = None  # ranks of a run; null: as the layout says. Systems have their own list
    max_gpu_hours: float | None = None  # more is refused; needed under Slurm
    cluster: str | None = None  # whose step time is predicted: a name or file; null: run.cluster of the base
    flops_per_second: float | None = None  # model FLOP/s that one rank reaches, where no cluster file describes it
    startup: float = 60.0  # seconds of a run that are not training, until one that is done tells them
    minutes: float | None = None  # minutes of a run, after which it saves and stops; null: no limit
    attempts: int = 3  # starts of a run in a row that save nothing new, after which it has failed
    discard: bool = False  # delete the checkpoints of runs that are done
    cores: int | None = None  # local: of the pool; null: all that this process may use
    devices: list[int] | None = None  # local: GPUs of the pool; null: all that there are
    gpus_per_node: int = 8  # slurm
    cpus_only: bool = False  # slurm: ask for no GPUs
    cpus_per_task: int | None = None  # slurm: cores of a rank; None: 8 beside a GPU
    sbatch: dict[str, Any] = field(default_factory=dict)  # slurm: further options, such as partition: NAME
    srun: list[str] = field(default_factory=list)  # slurm: further options of srun, such as a container's


@dataclass
class Experiment:
    experiment: About = field(default_factory=About)
    set: dict[str, Any] = field(default_factory=dict)  # changes to the base in every run
    grid: dict[str, Any] = field(default_factory=dict)  # key -> values, all of which are combined
    zip: list[dict[str, Any]] = field(default_factory=list)  # keys whose values go together, one by one
    random: Random | None = None
    exclude: list[str] = field(default_factory=list)  # conditions; a run for which one holds is left out
    derive: dict[str, Any] = field(default_factory=dict)  # key -> expression
    halving: Halving | None = None  # rounds of a sweep
    rungs: dict[str, Any] = field(default_factory=dict)  # rungs of a ladder: name -> settings of a size of the model
    tokens_per_parameter: list[float] | None = None  # budgets of a ladder: one of these three
    tokens: list[float] | None = None
    flops: list[float] | None = None
    trunk: Trunk | None = None
    parameters: Sizes = field(default_factory=Sizes)
    holdout: Holdout = field(default_factory=Holdout)
    fit: Fit = field(default_factory=Fit)
    gpus: list[int] | None = None  # numbers of ranks, in experiments of the kind systems
    scaling: Literal["weak", "strong"] | None = None  # weak: sequences of a DP rank stay; strong: batch.global does
    layouts: dict[str, Any] | list[dict[str, Any]] | None = None  # {plan: n}, a list, or a grid over parallel.*
    measure: Measure | None = None
    launch: Launch = field(default_factory=Launch)
