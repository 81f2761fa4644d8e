"""The mesh of ranks, and collectives with gradients."""
