"""The run folder as training sees it: paths, the lock, records of starts, metrics, and secrets kept out of them."""
