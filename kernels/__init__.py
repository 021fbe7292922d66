"""Fused CUDA optimizer kernels; imported as `diagnose.kernels`."""
