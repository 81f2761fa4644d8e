"""Who hangs and why: the watchdog, what every rank does, and reports of failures."""
