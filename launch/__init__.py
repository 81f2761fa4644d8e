"""Launching and looking after runs, with the standard library alone: a login node's Python 3.9 is enough."""
