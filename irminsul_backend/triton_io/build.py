"""Builds each step of the ensemble from the server's settings, inside its stub process."""

from __future__ import annotations

from irminsul_backend.config import ServerConfig
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.logs import set_up_logging
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.triton_io.endpoints import UnaryEndpoint
from irminsul_backend.triton_io.engine_model import EngineModel
from irminsul_backend.triton_io.server.lifeline import follow_supervisor
from irminsul_backend.triton_io.steps import ChunkerModel, DetokenizerModel


def _begin(model: str) -> ServerConfig:
    follow_supervisor()
    config = ServerConfig.from_env()
    set_up_logging(config, model)
    return config


def make_chunker() -> ChunkerModel:
    """Load the tokenizer and the chat template. This process does not import torch."""
    from irminsul_backend.frontend.chunker import PromptPreparer
    from irminsul_backend.triton_io.metrics import ChunkerMetrics

    config = _begin("irminsul_chunker")
    preparer = PromptPreparer(config)
    return ChunkerModel(preparer, 16 * config.max_text_bytes, ChunkerMetrics(preparer.sessions))


def make_engine() -> EngineModel:
    """Load the model's weights and start the engine's thread."""
    from irminsul_backend.engine import Engine
    from irminsul_backend.triton_io.metrics import EngineMetrics

    config = _begin("irminsul_engine")
    engine = Engine.from_config(config, on_fatal=lambda reason: model.on_fatal(reason))
    model = EngineModel(engine, EngineMetrics(engine), config.stream_interval_ms / 1000)
    engine.start()
    follow_supervisor(lambda: engine.drain(config.drain_s))
    return model


def make_detokenizer() -> DetokenizerModel:
    """Load the tokenizer."""
    from irminsul_backend.text import IncrementalDetokenizer, Tokenizer

    config = _begin("irminsul_detokenizer")
    tokenizer = Tokenizer.load(config.model)

    def detokenizer(request: GenerationRequest) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tokenizer, request.stop_words)

    return DetokenizerModel(TranscriptTable(detokenizer))


def make_unary() -> UnaryEndpoint:
    """The endpoint that calls the ensemble."""
    _begin("irminsul_unary")
    return UnaryEndpoint()
