"""Programs around training, grouped by what they work on."""
