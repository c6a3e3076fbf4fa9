"""The engine: plans, batches, runs the model, samples. The only authority on what is reused."""

from irminsul_backend.engine.engine import Engine

__all__ = ["Engine"]
