"""`megalite show --schedule`: the timeline of a pipeline schedule, and its bubble in words."""

import re
from pathlib import Path

from rich.text import Text

from megalite.base.errors import InputError
from megalite.base.files import exists, write_new, write_whole
from megalite.base.terminal import console, sections
from megalite.config.parallel_schema import SCHEDULES
from megalite.config.rules.parallel import SCHEDULE_FILES
from megalite.config.schema import Config
from megalite.cost.order_costs import costing_of
from megalite.cost.texts import searched_text
from megalite.plan import automatic
from megalite.plan.pipeline import actions, bubble, micro_batches, pairs_up, table_of
from megalite.schedule.actions import Table
from megalite.schedule.draw import draw_svg, draw_text, title
from megalite.schedule.file import write
from megalite.schedule.generate import AUTO_SCHEDULE
from megalite.schedule.simulate import simulate
from megalite_launch.base.texts import seconds_text

OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")  # a key that the option has taken for its file
MAX_UNASKED_ACTIONS = (
    20_000  # actions; up to this length, schedules are searched and walked through unasked, in about a second
)


def check_path(path: str) -> None:
    """Raises InputError if a schedule cannot be written to `path`: for its ending, or since there is such a file."""
    if OVERRIDE.match(path):
        raise InputError(f"--schedule {path}: is no file; KEY=VALUE goes before --schedule")
    if not path.endswith((".svg", *SCHEDULE_FILES)):
        rule = "must end in .svg for a picture or .yaml for a schedule file; CONFIG goes before --schedule"
        raise InputError(f"--schedule {path}: {rule}")
    if path.endswith(SCHEDULE_FILES) and exists(path):  # it may be a CONFIG that the option has taken for its file
        raise InputError(f"--schedule {path}: there is such a file already; CONFIG goes before --schedule")


def show_schedule(config: Config, path: str) -> None:
    """Prints the timeline of the schedule, and writes it to `path` unless that is empty."""
    schedule = table_of(config, None, costing_of(config))
    timeline = simulate(schedule)
    on = console()
    picture, times = draw_text(schedule, timeline, on.width), _times(config, schedule, float(timeline.makespan))
    sections(on, [(title(schedule, timeline), picture), ("Times", Text(times))])
    if path:
        if path.endswith(".svg"):
            write_whole(Path(path), draw_svg(schedule, timeline))
        else:
            write_new(Path(path), write(schedule))


def _times(config: Config, schedule: Table, makespan: float) -> str:
    """Explain the times of a schedule and their unit."""
    if schedule.times is None:
        return "All stages take equally long: 1 for a forward pass, 2 for a backward pass, 1 for each half of one."
    if config.parallel.pipeline.schedule != AUTO_SCHEDULE:
        return "Times are those of the schedule's file, in its unit."
    costs = automatic.wanted(config, micro_batches(config), costing_of(config)).costs
    unit = "The unit is the forward pass of an average stage."
    if costs.cluster is not None:
        unit = f"The unit is the second, so the passes take {seconds_text(makespan)}, transfers left out."
    if config.parallel.pp == 1:  # all orders are alike
        return unit
    told = searched_text(config, costs)
    return f"{told[0].upper()}{told[1:]}. {unit}"


def bubble_text(config: Config) -> str:
    """The share of a step in which ranks idle; for `auto`, beside the best named schedule."""
    schedule, m = config.parallel.pipeline.schedule, micro_batches(config)
    if schedule != AUTO_SCHEDULE:
        times = "all stages take equally long"
        if schedule not in SCHEDULES and table_of(config).times is not None:
            times = "stages take the times of the file"
        turns = ", in which forwards and backwards take turns," if pairs_up(config) else ""
        return f"The bubble of {schedule}{turns} is {bubble(config):.1%} of a step where {times}."
    if actions(config, m) > MAX_UNASKED_ACTIONS:
        return f"The order of {schedule} is not searched here: one of {actions(config, m):,} actions takes a while."
    costing = costing_of(config)
    asked = automatic.wanted(config, m, costing)
    order = automatic.found(asked)
    share = bubble(config, costing)
    told = f"The bubble of {schedule} is {share:.1%} of a step, where {searched_text(config, asked.costs)}."
    if order.best_named is None:
        return f"{told} No named schedule of such stages keeps to its memory."
    longer = order.named[order.best_named] / order.makespan - 1
    than = f"takes {longer:.1%} longer" if longer > 0 else "takes as long"
    return f"{told} Of the named schedules in its memory, the fastest is {order.best_named}, which {than}."
