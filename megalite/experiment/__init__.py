"""Many runs from one file: expanded, budgeted, launched and collected."""
