"""The HTML page of `megalite plan`, a module for each kind of picture."""
