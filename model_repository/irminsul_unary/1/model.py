"""The ensemble for /infer: one answer, with the session as an input."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from irminsul_backend.triton_io import build


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.model = build.make_unary()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        self.model.execute(requests)

    def finalize(self) -> None:
        self.model.finalize()
