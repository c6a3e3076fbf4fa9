"""Kernels other than attention: rotation, RMSNorm and writing of new rows, SiLU gate, sampling."""
