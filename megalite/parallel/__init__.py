"""Tensor, context, pipeline and sharded data parallelism, recompute and offload. It knows no model."""
