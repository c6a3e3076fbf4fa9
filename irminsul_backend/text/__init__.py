"""Text on both sides of the model: chat template, tokenizer, incremental detokenizer. No torch, no Triton."""

from irminsul_backend.text.detokenizer import IncrementalDetokenizer
from irminsul_backend.text.template import ChatTemplate
from irminsul_backend.text.tokenizer import Encoded, Tokenizer

__all__ = ["ChatTemplate", "Encoded", "IncrementalDetokenizer", "Tokenizer"]
