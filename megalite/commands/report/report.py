"""`megalite report`: one page about a run, which needs neither a network nor scripts."""

import argparse
from contextlib import suppress
from pathlib import Path

from megalite.base.errors import InputError, printable
from megalite.base.exit_codes import ExitCode
from megalite.base.files import check_writable, write_whole
from megalite.commands.report.page import page
from megalite.commands.report.run_facts import RunFacts, read_run
from megalite.cost.cluster import Cluster, load_cluster
from megalite.cost.gpu_names import cluster_of
from megalite.cost.order_costs import costing_of
from megalite.cost.predict import Prediction, predict
from megalite.plan.memory.fit import TENSOR_SHARE, fitted
from megalite_launch.base.errors import UserError
from megalite_launch.base.files import PRIVATE_MODE
from megalite_launch.watch.run import open_run
from megalite_launch.watch.summary import summary

PAGE = "report.html"  # in the run folder
MAX_PASSES = 300_000  # passes of sequences through stages in a step that is simulated


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path. Returns the exit code.

    args: `arguments`, the run folder; `html`, the file to write or None; `cluster`, a name, a file or None. Raises
    InputError for what is no run folder, a page that cannot be written and a cluster that is unknown. Whatever is
    missing or damaged in the folder is told on the page.
    """
    if len(args.arguments) != 1:
        raise InputError(f"megalite report takes one run folder, not {len(args.arguments)}; give the path of one")
    folder = Path(args.arguments[0])
    out = folder / PAGE if args.html is None else Path(args.html)
    asked = None if args.cluster is None else load_cluster(args.cluster)
    try:
        watched = open_run(str(folder))
        watched.update()
    except UserError as error:
        raise InputError(str(error)) from None
    check_writable(out)
    facts = read_run(folder)
    prediction, why_not = prediction_of(facts, asked)
    text = page(watched, summary(watched), facts, prediction, why_not)
    write_whole(out, text, PRIVATE_MODE)  # as the records of starts, from which it has paths and settings
    print(printable(str(out)))
    return ExitCode.DONE


def prediction_of(facts: RunFacts, asked: Cluster | None) -> tuple[Prediction | None, str]:
    """Predict a step of the latest start, or tell why there is no prediction.

    asked: the cluster of the command line. Without one, it is `run.cluster`, or the one that has the GPUs of the run.
    """
    config = facts.config
    if config is None:
        return None, "No prediction, as there is no configuration."
    parallel = config.parallel
    if config.batch.global_ // parallel.layout.dp * parallel.pp * parallel.pipeline.stages_per_rank > MAX_PASSES:
        return None, "No prediction, as a step is too long to be simulated here; megalite show predicts it."
    try:
        cluster = asked or _cluster_of(facts)
        if cluster is None:
            return None, "No prediction, as no known cluster has these devices; --cluster NAME chooses one."
        room = round(cluster.gpu.memory * TENSOR_SHARE)
        return predict(fitted(config, room, costing=costing_of(config)), cluster), ""
    except InputError as error:
        return None, f"No prediction: {printable(str(error))}"


def _cluster_of(facts: RunFacts) -> Cluster | None:
    assert facts.config is not None
    if facts.config.run.cluster is not None:
        return load_cluster(facts.config.run.cluster, "run.cluster = ")
    names = [name for device in facts.devices if (name := cluster_of(device)) is not None]
    with suppress(IndexError):
        return load_cluster(names[0])
    return None
