"""Configuration keys, loading and merging of files, validation, and the arithmetic of a layout."""
