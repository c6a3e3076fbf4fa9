"""The ensemble for /generate_stream and /generate, with the session as an input."""

from __future__ import annotations

from typing import Any

from irminsul_backend.triton_io import endpoints as entrances


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.model = entrances.Entrance(streams=True)

    def execute(self, requests: list[Any]) -> Any:
        return self.model.execute(requests)

    def finalize(self) -> None:
        self.model.finalize()
