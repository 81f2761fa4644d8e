"""Programs that inspect, compare and convert checkpoints, and let a model speak."""
