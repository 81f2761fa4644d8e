"""Pipeline schedules as tables: generated, searched, checked, simulated and drawn."""
