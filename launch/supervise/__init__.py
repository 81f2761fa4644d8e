"""Looking after the ranks of a job: starting them again, and why."""
