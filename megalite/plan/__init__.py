"""Predictions of what every rank holds, computes and sends, from a configuration alone. Imports no torch."""
