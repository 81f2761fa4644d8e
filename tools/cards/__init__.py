"""Evidence cards: every family of presets, trained at small size and checked."""
