"""Training steps of megalite and of other programs, measured beside each other on one machine."""
