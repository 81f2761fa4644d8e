"""Programs that make tokenizers and token stores, and look into them."""
