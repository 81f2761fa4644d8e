"""Programs for experiments: sweeps, evaluation, laws and pictures."""
