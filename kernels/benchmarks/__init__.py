"""Speed of the kernels beside torch.compile, eager PyTorch and Liger: `python -m megalite_kernels.benchmarks`."""
