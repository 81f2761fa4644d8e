"""Diagnosis of hangs: the watchdog, and what every rank does."""
