"""The run folder as training sees it: paths, the lock, records of starts, and metrics."""
