"""Builds each step of the ensemble from the server's settings, inside its stub process."""

from __future__ import annotations

from irminsul_backend.config import ServerConfig
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.triton_io.engine_model import EngineModel
from irminsul_backend.triton_io.server.lifeline import follow_supervisor
from irminsul_backend.triton_io.steps import ChunkerModel, DetokenizerModel, set_up_logging


def _begin() -> ServerConfig:
    follow_supervisor()
    config = ServerConfig.from_env()
    set_up_logging(config)
    return config


def make_chunker() -> ChunkerModel:
    """Load the tokenizer and the chat template. This process does not import torch."""
    from irminsul_backend.frontend.chunker import PromptPreparer

    config = _begin()
    return ChunkerModel(PromptPreparer(config), max_waiting_bytes=16 * config.max_text_bytes)


def make_engine() -> EngineModel:
    """Load the model's weights and start the engine's thread."""
    from irminsul_backend.engine import Engine
    from irminsul_backend.triton_io.metrics import EngineMetrics

    config = _begin()
    engine = Engine.from_config(config)
    engine.start()
    follow_supervisor(lambda: engine.drain(config.drain_s))
    return EngineModel(engine, EngineMetrics(engine), config.stream_interval_ms / 1000)


def make_detokenizer() -> DetokenizerModel:
    """Load the tokenizer."""
    from irminsul_backend.text import IncrementalDetokenizer, Tokenizer

    config = _begin()
    tokenizer = Tokenizer.load(config.model)

    def detokenizer(request: GenerationRequest) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tokenizer, request.stop_words)

    return DetokenizerModel(TranscriptTable(detokenizer))
