"""Start of ranks: processes, signals, finding each other."""
