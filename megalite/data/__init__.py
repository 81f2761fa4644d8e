"""Token stores, the order of samples, the loader, and tokenizers."""
