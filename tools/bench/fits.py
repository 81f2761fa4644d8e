"""Recovery of scaling laws from synthetic ladders: errors of fits, and how often intervals hold the truth."""

import argparse
import sys
from math import isqrt

import numpy as np

from megalite.base.entry import exit_code
from megalite.base.terminal import console, sections, table
from megalite.scaling.approach3 import MIN_RUNS, fit3, refit
from megalite.scaling.bootstrap import draws, interval
from megalite.scaling.forms import Array
from megalite.scaling.law import FLOPS, Law

COMMAND = "python -m megalite_tools.bench.fits"
TRUTH = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # Besiroglu et al. 2024, arXiv 2404.10102
MIN_PARAMETERS, RATIOS = 10**7.5, (5.0, 80.0)  # parameters, and tokens per parameter
LADDERS = ((3, 3, 1.0, 0.003), (5, 4, 1.0, 0.003), (5, 5, 1.5, 0.003), (5, 5, 1.5, 0.01), (6, 6, 2.0, 0.003))
COVERAGE_CASES = ((9, 0.003), (25, 0.003), (64, 0.003), (9, 0.01), (25, 0.01), (64, 0.01))


def main(argv: list[str] | None = None) -> int:
    """Runs the program. Returns the exit code."""
    return exit_code(COMMAND, lambda: _main(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--trials", type=int, default=150, metavar="N", help="ladders of each kind (default: 150)")
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="draws of an interval (default: 200)")
    parser.add_argument("--delta", type=float, default=1e-3, help="where Huber's loss becomes linear (default: 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    return parser


def _main(options: argparse.Namespace) -> None:
    found = table("sizes × budgets", "decades of N", "noise", "alpha", "beta", "a", "loss at 10 C", "loss at 100 C")
    for sizes, budgets, decades, noise in LADDERS:
        off = errors(sizes, budgets, decades, noise, options.trials, options.delta, options.seed)
        shown = [f"{off[name]:.3f}" for name in ("alpha", "beta", "a")]
        shown += [f"{off[name]:.1%}" for name in ("loss at 10 C", "loss at 100 C")]
        found.add_row(f"{sizes} × {budgets}", f"{decades:g}", f"{noise:.1%}", *shown)
    names = list(quantities(TRUTH, 1.0))
    held = table("runs", "noise", *names)
    for runs, noise in COVERAGE_CASES:
        shares = coverage(runs, options.trials, options.draws, 1.5, noise, options.delta, options.seed)
        held.add_row(str(runs), f"{noise:.1%}", *(f"{shares[name]:.3f}" for name in names))
    sections(
        console(),
        [
            (f"Errors: the 90th percentile of {options.trials} ladders, delta {options.delta:g}", found),
            (f"How often an interval of 90% holds the truth, of {options.trials} ladders over 1.5 decades", held),
        ],
    )


def grid(sizes: int, budgets: int, decades: float) -> tuple[Array, Array]:
    """N and D of a ladder."""
    n = np.repeat(MIN_PARAMETERS * np.logspace(0, decades, sizes), budgets)
    return n, n * np.tile(np.geomspace(*RATIOS, budgets), sizes)


def quantities(law: Law, largest: float) -> dict[str, Array]:
    """Quantities that intervals are made of, by name; of every law, where `law` holds several."""
    found = {"E": law.E, "alpha": law.alpha, "beta": law.beta, "a": law.exponent}
    found |= {f"loss at {times} C": law.best_loss(times * largest) for times in (10, 100)}
    found["N_opt at 10 C"] = law.optimum(10 * largest)[0]
    return {name: np.asarray(value, float) for name, value in found.items()}


def errors(
    sizes: int, budgets: int, decades: float, noise: float, trials: int, delta: float, seed: int
) -> dict[str, float]:
    """The 90th percentile of how far fits are from the truth; of losses, relatively."""
    generator = np.random.default_rng(seed)
    n, d = grid(sizes, budgets, decades)
    largest = float((FLOPS * n * d).max())
    truth, off = quantities(TRUTH, largest), dict[str, list[float]]()
    for _ in range(trials):
        losses = TRUTH.loss(n, d) * np.exp(noise * generator.standard_normal(len(n)))
        for name, value in quantities(fit3(n, d, losses, delta).law, largest).items():
            scale = truth[name] if name.startswith("loss") else 1.0
            off.setdefault(name, []).append(float(abs(value - truth[name]) / scale))
    return {name: float(np.percentile(values, 90)) for name, values in off.items()}


def coverage(
    runs: int, trials: int, samples: int, decades: float, noise: float, delta: float, seed: int
) -> dict[str, float]:
    """The share of ladders whose interval holds the truth, by quantity."""
    generator = np.random.default_rng(seed)
    n, d = grid(isqrt(runs), isqrt(runs), decades)
    largest = float((FLOPS * n * d).max())
    truth, held = quantities(TRUTH, largest), dict[str, list[bool]]()
    for trial in range(trials):
        losses = TRUTH.loss(n, d) * np.exp(noise * generator.standard_normal(runs))
        fit = fit3(n, d, losses, delta)
        drawn = quantities(refit(fit, n, d, losses, delta, draws(runs, samples, MIN_RUNS, seed=trial)), largest)
        for name, values in drawn.items():
            band = interval(0.0, values, runs, name.startswith("N_opt"))
            held.setdefault(name, []).append(bool(band.low <= truth[name] <= band.high))
    return {name: float(np.mean(values)) for name, values in held.items()}


if __name__ == "__main__":
    sys.exit(main())
