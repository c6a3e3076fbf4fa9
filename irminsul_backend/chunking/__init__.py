"""Cutting token ids into chunks by their content, and fingerprinting the chunks."""

from irminsul_backend.chunking.cutting import cut, gram_hashes, recut, visible_marker
from irminsul_backend.chunking.fingerprints import chunk_starts, fingerprint
from irminsul_backend.chunking.presets import PRESETS, Preset

__all__ = ["PRESETS", "Preset", "chunk_starts", "cut", "fingerprint", "gram_hashes", "recut", "visible_marker"]
