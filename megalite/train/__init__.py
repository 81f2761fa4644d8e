"""Training: building a job, one step, the loop around it, guards and reports."""
