"""Entry points of the installed programs. They handle signals before they import anything that takes time."""

import sys
from collections.abc import Callable

from megalite.base.late_import import import_for_good
from megalite.base.stop_signals import Stopped, ended_at_once, listen, stop


def _program(module: str) -> Callable[[], int]:
    def main() -> int:
        with ended_at_once():
            program = import_for_good(f"megalite_tools.{module}")
            try:
                listen(stop)  # signals raise an exception from here on, so that the program can clean up
                code: int = program.main()
            except Stopped as stopped:  # a signal came while the program read its arguments
                print(stopped, file=sys.stderr)
                return stopped.code
            return code

    return main


train_tokenizer = _program("data.train_tokenizer")
prepare_data = _program("data.prepare_data")
inspect_data = _program("data.inspect_data")
merge_data = _program("data.merge_data")
split_data = _program("data.split_data")
dedup_data = _program("data.dedup_data")
inspect_checkpoint = _program("checkpoint.inspect_checkpoint")
convert = _program("checkpoint.convert")
validate_planner = _program("plan.validate_planner")
calibrate_cluster = _program("plan.calibrate_cluster")
generate = _program("checkpoint.generate")
evaluate = _program("experiment.evaluate")
sweep = _program("experiment.sweep")
coordinate_check = _program("experiment.coordinate_check")
plot_metrics = _program("experiment.plot_metrics")
fit_law = _program("experiment.fit_law")
predict = _program("experiment.predict")
bench_step = _program("bench.step")
bench_memory = _program("bench.memory")
bench_pipeline = _program("bench.pipeline")
bench_schedules = _program("bench.schedules")
bench_context = _program("bench.context")
bench_exchanges = _program("bench.exchanges")
bench_checkpoint = _program("bench.checkpoint")
bench_convert = _program("bench.convert")
bench_states = _program("bench.states")
bench_data = _program("bench.data")
bench_preparation = _program("bench.preparation")
bench_counts = _program("bench.counts")
bench_training = _program("bench.training.command")
bench_device = _program("bench.device")
