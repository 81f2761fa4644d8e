"""How much of a run's time counts: formulas, a simulation, and advice from what a run has measured."""
