"""How fast the kernels are, beside torch.compile, eager PyTorch and Liger: `python -m megalite_kernels.benchmarks`."""
