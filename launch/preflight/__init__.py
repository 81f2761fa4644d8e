"""Checks of nodes before a job trains on them; see docs/preflight.md."""
