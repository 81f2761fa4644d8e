"""How ranks start: processes, signals, finding each other."""
