"""Start and end of ranks: processes, signals, finding each other, reports of failures."""
