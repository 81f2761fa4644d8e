"""Names and shapes of tensors in other programs, and what their configurations mean; no files."""
