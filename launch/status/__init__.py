"""Telling how a run does, in a terminal and as a page."""
