"""How ranks start and end: processes, signals, finding each other, reports of failures."""
