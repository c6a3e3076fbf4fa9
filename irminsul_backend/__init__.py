"""Irminsul: MLA models on NVIDIA Triton with a KV cache addressed by content."""

__version__ = "0.1.0"
