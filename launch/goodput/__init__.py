"""Share of a run's time that counts: formulas, a simulation, and advice from what a run has measured."""
