"""What a checkpoint is on disk: index, files, manifest with hashes, progress, retention."""
