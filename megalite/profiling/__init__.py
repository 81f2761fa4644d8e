"""Traces of a run's profiled steps: where their time goes, beside what the planner predicts. Imports no torch."""
