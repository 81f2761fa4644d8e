"""`megalite report`: one page about a run, with all that its folder tells."""
