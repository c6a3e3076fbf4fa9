"""The configurations of the Triton models, made from the tensors at the border. `make generate` writes them.

None has `sequence_batching`: a request carries its correlation id and flags without it, and the batcher would let
every new sequence wait, with neither limit nor message, once as many are open as it has slots. `frontend.sessions`
keeps the rules of sessions instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from irminsul_backend.triton_io.tensors import (
    CONTROL_INPUT,
    EVENT_TENSORS,
    PLAN_TENSORS,
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    SESSION_INPUTS,
    TensorSpec,
)

_DECOUPLED = "model_transaction_policy { decoupled: true }\n"
_ONE_INSTANCE = "instance_group [ { kind: KIND_CPU, count: 1 } ]\n"
_ENGINE_OUTPUT = {"output_ids": "engine_output_ids", "output_log_probs": "engine_output_log_probs", "event": "event"}
"""Names inside the ensemble; without the prefix they would be the ensemble's own outputs."""


def model_configs() -> dict[str, str]:
    """The text of each model's config.pbtxt, by the model's name."""
    with_session = (*REQUEST_INPUTS, *SESSION_INPUTS)
    return {
        "irminsul": _config("irminsul", REQUEST_INPUTS, RESPONSE_OUTPUTS, scheduling=_ensemble(REQUEST_INPUTS)),
        "irminsul_chunker": _config("irminsul_chunker", with_session, PLAN_TENSORS, decoupled=True),
        "irminsul_engine": _config("irminsul_engine", (*PLAN_TENSORS, CONTROL_INPUT), EVENT_TENSORS, decoupled=True),
        "irminsul_detokenizer": _config(
            "irminsul_detokenizer", EVENT_TENSORS, RESPONSE_OUTPUTS, decoupled=True, optional=False
        ),
        "irminsul_generate": _config(
            "irminsul_generate", with_session, RESPONSE_OUTPUTS, scheduling=_ensemble(with_session)
        ),
        "irminsul_unary": _config("irminsul_unary", with_session, RESPONSE_OUTPUTS),
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


def _ensemble(inputs: Sequence[TensorSpec]) -> str:
    plan = {spec.name: spec.name for spec in PLAN_TENSORS}
    steps = (
        _step("irminsul_chunker", {spec.name: spec.name for spec in inputs}, plan),
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
