"""`python -m irminsul_kernels.bench`: checks and times the kernels on the NVIDIA GPU at hand."""
