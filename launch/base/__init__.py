"""Parts that the programs of this package share: files, events, paths of a run folder, processes, texts."""
