"""The plan that follows from a configuration, for all ranks: worked out once and passed on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from megalite.config.layers import LayerKind, layer_kinds
from megalite.config.schema import Config
from megalite.plan.activations import Activations
from megalite.plan.automatic import Costing
from megalite.plan.model.size import layer_forward_flops
from megalite.plan.pipeline import placement, table_of, tables_of, uses_copies, uses_fsdp
from megalite.plan.recompute_modes import FORWARD_PASSES, Costs, Mode, ModeCost, modes_by_stage
from megalite.plan.split import layers_of, split_of
from megalite.schedule.actions import Table


@dataclass(frozen=True)
class Plan:
    """The layers of every stage and their kinds, the rank that owns each stage, and the actions of ranks in a step."""

    config: Config
    kinds: tuple[LayerKind, ...]  # kind of every layer
    layers: tuple[range, ...]  # by stage
    placement: tuple[int, ...]  # stage -> the pipeline rank that owns it
    modes: Mapping[int, Sequence[Mode]]  # by stage: how each of its layers recomputes
    fsdp: bool  # FSDP2 gathers weights and reduces gradients
    copies: bool  # layers compute with copies of parameters, which are kept
    costing: Costing | None = field(default=None, repr=False, compare=False)  # gives `auto` the costs to search with
    _tables: dict[int, Table] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stages(self) -> int:
        return len(self.layers)

    @cached_property
    def sizes(self) -> Activations:
        """Sizes of activations."""
        return Activations(self.config)

    def stages_of(self, pp: int) -> list[int]:
        """The stages of pipeline rank `pp`."""
        return [stage for stage, owner in enumerate(self.placement) if owner == pp]

    def recomputed(self, stage: int) -> list[tuple[LayerKind, Mode]]:
        """The layers of a stage, and how each recomputes."""
        return [(self.kinds[layer], mode) for layer, mode in zip(self.layers[stage], self.modes[stage], strict=True)]

    def of(self, config: Config, tables: Mapping[int, Table]) -> "Plan":
        """Plan of `config`, which differs in nothing that a plan depends on, with schedules that are known."""
        return replace(self, config=config, _tables=dict(tables))

    def table(self, m: int) -> Table:
        """The schedule of a training step of `m` micro-batches. Raises InputError for one that cannot run."""
        if m not in self._tables:
            self._tables[m] = table_of(self.config, m, self.costing)
        return self._tables[m]


def resolve(
    config: Config,
    costs: Callable[[], Sequence[Costs]] | None = None,
    tables: Mapping[int, Table] | None = None,
    split: Sequence[int] | None = None,
    costing: Costing | None = None,
) -> Plan:
    """The plan of `config`, in which `parallel.dp_shard` and `batch.micro` must be numbers.

    costs: returns the costs of every layer; called only if recompute has a budget. None: costs are estimated. tables:
    the schedules of all its steps by number of micro-batches, where they are known. split: layers per stage, where
    they are known. costing: what `schedule: auto` searches for, see `automatic.wanted`. Raises InputError for a
    schedule that cannot run, and for a budget that no modes fit.
    """
    split = split_of(config) if split is None else split
    modes = modes_by_stage(
        config.train,
        lambda: list(tables.values()) if tables else tables_of(config, costing),
        split,
        lambda: Activations(config).outside(len(split)),
        costs or (lambda: estimated_costs(config)),
    )
    kinds, layers = layer_kinds(config.model), tuple(layers_of(split))
    manages = uses_fsdp(config), uses_copies(config)
    return Plan(config, kinds, layers, placement(config), modes, *manages, costing, dict(tables or {}))


def estimated_costs(config: Config) -> list[Costs]:
    """The costs of every layer. Kept bytes come from `plan.activations`, times from FLOPs. Runs measure both."""
    sizes, kinds = Activations(config), layer_kinds(config.model)
    first = layer_forward_flops(config.model, kinds[0])

    @cache
    def cost(kind: LayerKind) -> Costs:
        share = layer_forward_flops(config.model, kind) / first
        return {mode: ModeCost(share * times, sizes.layer_bytes(kind, mode)) for mode, times in FORWARD_PASSES.items()}

    return [cost(kind) for kind in kinds]
