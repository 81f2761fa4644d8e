"""Diagnosis of hangs: the watchdog, what every rank does, and reports of failures."""
