"""The configurations of the Triton models, made from the tensors at the border. `make generate` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from irminsul_backend.config import MAX_SESSION_TTL_S
from irminsul_backend.triton_io.tensors import (
    CONTROL_INPUT,
    EVENT_TENSORS,
    PLAN_TENSORS,
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    SESSION_INPUTS,
    TensorSpec,
)

MAX_SEQUENCES = 16384

_DECOUPLED = "model_transaction_policy { decoupled: true }\n"
_ONE_INSTANCE = "instance_group [ { kind: KIND_CPU, count: 1 } ]\n"
_SEQUENCES = f"""sequence_batching {{
  oldest {{ max_candidate_sequences: {MAX_SEQUENCES} }}
  max_sequence_idle_microseconds: {MAX_SESSION_TTL_S * 1e6:.0f}
}}
"""
_ENGINE_OUTPUT = {"output_ids": "engine_output_ids", "output_log_probs": "engine_output_log_probs", "event": "event"}
"""Names inside the ensemble; without the prefix they would be the ensemble's own outputs."""


def model_configs() -> dict[str, str]:
    """The text of each model's config.pbtxt, by the model's name."""
    endpoint_inputs = (*REQUEST_INPUTS, *SESSION_INPUTS)
    return {
        "irminsul": _config("irminsul", REQUEST_INPUTS, RESPONSE_OUTPUTS, scheduling=_ensemble()),
        "irminsul_chunker": _config("irminsul_chunker", REQUEST_INPUTS, PLAN_TENSORS, scheduling=_SEQUENCES),
        "irminsul_engine": _config("irminsul_engine", (*PLAN_TENSORS, CONTROL_INPUT), EVENT_TENSORS, decoupled=True),
        "irminsul_detokenizer": _config(
            "irminsul_detokenizer", EVENT_TENSORS, RESPONSE_OUTPUTS, decoupled=True, optional=False
        ),
        "irminsul_generate": _config("irminsul_generate", endpoint_inputs, RESPONSE_OUTPUTS, decoupled=True),
        "irminsul_unary": _config("irminsul_unary", endpoint_inputs, RESPONSE_OUTPUTS),
    }


def _config(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    decoupled: bool = False,
    optional: bool = True,
    scheduling: str = "",
) -> str:
    ensemble = scheduling.startswith("ensemble")
    return "".join(
        (
            f'name: "{name}"\n',
            'platform: "ensemble"\n' if ensemble else 'backend: "python"\n',
            "max_batch_size: 8\n",
            _DECOUPLED if decoupled else "",
            _tensors("input", inputs, ", optional: true" if optional else ""),
            _tensors("output", outputs, ""),
            scheduling,
            "" if ensemble else _ONE_INSTANCE,
        )
    )


def _tensors(kind: str, specs: Iterable[TensorSpec], suffix: str) -> str:
    lines = [f'  {{ name: "{s.name}", data_type: TYPE_{s.dtype}, dims: [ {s.dims} ]{suffix} }}' for s in specs]
    return f"{kind} [\n" + ",\n".join(lines) + "\n]\n"


def _ensemble() -> str:
    plan = {spec.name: spec.name for spec in PLAN_TENSORS}
    steps = (
        _step("irminsul_chunker", {spec.name: spec.name for spec in REQUEST_INPUTS}, plan),
        _step("irminsul_engine", plan, _ENGINE_OUTPUT),
        _step("irminsul_detokenizer", _ENGINE_OUTPUT, {spec.name: spec.name for spec in RESPONSE_OUTPUTS}),
    )
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [
        f'      {kind}_map {{ key: "{key}" value: "{value}" }}\n'
        for kind, names in (("input", inputs), ("output", outputs))
        for key, value in names.items()
    ]
    return f'    {{\n      model_name: "{model}"\n      model_version: -1\n' + "".join(maps) + "    }"
