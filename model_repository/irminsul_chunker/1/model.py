"""Prompt -> token ids, chunks and a packed request; holds the sessions."""

from __future__ import annotations

from typing import Any

from irminsul_backend.triton_io import build as serving


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.model = serving.make_chunker()

    def execute(self, requests: list[Any]) -> Any:
        return self.model.execute(requests)

    def finalize(self) -> None:
        self.model.finalize()
