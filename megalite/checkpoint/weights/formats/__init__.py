"""File formats of weights and tokenizers, each read without running code from a file."""
