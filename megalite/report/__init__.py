"""Pictures with matplotlib, and the page of an experiment."""
