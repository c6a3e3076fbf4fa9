"""Token ids and chunks -> events: owns the KV rows, prefills and decodes."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from irminsul_backend.triton_io import build


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.model = build.make_engine()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        self.model.execute(requests)

    def is_ready(self) -> bool:
        return self.model.is_ready()

    def finalize(self) -> None:
        self.model.finalize()
