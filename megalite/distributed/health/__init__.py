"""Who hangs and why: the watchdog, and what every rank does."""
