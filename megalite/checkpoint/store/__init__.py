"""Parts of a checkpoint on disk: index, files, manifest with hashes, progress, retention."""
