"""`megalite show`, a module for each of its sections."""
