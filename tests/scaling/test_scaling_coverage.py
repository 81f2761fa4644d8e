"""How often intervals hold the truth. `python -m megalite_tools.bench.fits` prints the whole table."""

import numpy as np

from megalite_tools.bench.fits import coverage


def test_nine_in_ten_intervals_hold_the_truth():
    shares = coverage(runs=9, trials=60, samples=100, decades=1.5, noise=0.003, delta=1e-3, seed=5)
    assert set(shares) == {"E", "alpha", "beta", "a", "loss at 10 C", "loss at 100 C", "N_opt at 10 C"}
    assert 0.84 <= np.mean(list(shares.values())) <= 0.98
    assert min(shares.values()) >= 0.75
