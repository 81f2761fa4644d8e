"""Programs that check and calibrate the planner."""
