"""Watching a run: what state it is in, and where its time went. Everything here only reads the run folder."""
