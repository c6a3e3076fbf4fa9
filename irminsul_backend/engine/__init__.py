"""The engine: plans, batches, runs the model and samples. It alone decides what is reused."""

from irminsul_backend.engine.engine import Engine
from irminsul_backend.engine.placement import resolve_device

__all__ = ["Engine", "resolve_device"]
