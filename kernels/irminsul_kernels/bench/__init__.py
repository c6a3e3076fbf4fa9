"""Benchmark of the kernels on an NVIDIA GPU: `python -m irminsul_kernels.bench`."""
