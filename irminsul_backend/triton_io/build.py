"""Builds each step of the ensemble from the server's settings, inside its stub process."""

from __future__ import annotations

from irminsul_backend.config import ServerConfig
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.logs import set_up_logging
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.triton_io.endpoints import Endpoint
from irminsul_backend.triton_io.steps import ChunkerModel, DetokenizerModel, EngineModel


def make_chunker() -> ChunkerModel:
    """Load the tokenizer and the chat template. This process does not import torch."""
    from irminsul_backend.frontend.chunker import PromptPreparer

    config = ServerConfig.from_env()
    set_up_logging(config, "irminsul_chunker")
    return ChunkerModel(PromptPreparer(config))


def make_engine() -> EngineModel:
    """Load the model's weights and start the engine's thread."""
    from irminsul_backend.engine import Engine
    from irminsul_backend.triton_io.metrics import EngineMetrics

    config = ServerConfig.from_env()
    set_up_logging(config, "irminsul_engine")
    engine = Engine.from_config(config)
    engine.start()
    return EngineModel(engine, EngineMetrics(engine).count, config.stream_interval_ms / 1000)


def make_detokenizer() -> DetokenizerModel:
    """Load the tokenizer."""
    from irminsul_backend.text import IncrementalDetokenizer, Tokenizer

    config = ServerConfig.from_env()
    set_up_logging(config, "irminsul_detokenizer")
    tokenizer = Tokenizer.load(config.model)

    def detokenizer(request: GenerationRequest) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tokenizer, request.stop_words)

    return DetokenizerModel(TranscriptTable(detokenizer))


def make_endpoint(name: str, streams: bool) -> Endpoint:
    """name: the model's. streams: whether a request may get more than one response."""
    set_up_logging(ServerConfig.from_env(), name)
    return Endpoint(streams)
