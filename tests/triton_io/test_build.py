"""The steps as the stub processes build them from the environment: a prompt goes through all three."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from irminsul_backend.config import ServerConfig
from irminsul_backend.triton_io.server.launcher import find_model_repository

START, END = 1, 2
CONFIG = ServerConfig(device="cpu", capacity_tokens=256, threads=1, log_level="ERROR")


@pytest.fixture
def load(border: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a model.py of the repository as the stub does."""
    for name, value in CONFIG.to_env().items():
        monkeypatch.setenv(name, value)
    border("endpoints"), border("build")
    models = []

    def one(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, find_model_repository() / name / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        models.append(module.TritonPythonModel())
        models[-1].initialize({})
        return models[-1]

    yield one
    for model in models:
        model.finalize()


def test_a_prompt_goes_through_all_three_steps(load: Any, make_request: Any, backend_utils: Any) -> None:
    chunker, engine, detokenizer = (load(f"irminsul_{name}") for name in ("chunker", "engine", "detokenizer"))
    request = make_request("s", START | END, text_input="hello there", max_tokens=3, ignore_eos=True)
    chunker.execute([request])
    (plan,) = request.sender.wait()
    generation = backend_utils.InferenceRequest(inputs=plan.output_tensors())
    engine.execute([generation])
    replies = []
    for event in generation.sender.wait():
        text = backend_utils.InferenceRequest(inputs=event.output_tensors())
        detokenizer.execute([text])
        replies += text.sender.wait()
    (reply,) = replies
    outputs = backend_utils.outputs(reply)
    assert (outputs["finish_reason"], len(outputs["output_ids"])) == ("length", 3)
    assert json.loads(outputs["usage"])["completion_tokens"] == 3
    engine.finalize()  # it publishes what has been counted
    assert backend_utils.metrics['irminsul_requests_total{outcome="length"}'].value == 1
    assert backend_utils.metrics['irminsul_cache_slots{state="capacity"}'].value == 256


def test_the_endpoint_without_an_ensemble(load: Any, make_request: Any) -> None:
    request = make_request(text_input="x")
    load("irminsul_unary").execute([request])
    assert request.sender.errors() == ["RuntimeError: model irminsul_generate is not loaded"]
