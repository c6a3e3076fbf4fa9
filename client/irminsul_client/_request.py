"""From keyword arguments to the input tensors of the Triton models. Knows the tensor contract and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from irminsul_client._inputs import PROMPTS, TENSOR_NAMES, TENSORS, RequestOptions
from irminsul_client.errors import InvalidRequest


def build_fields(options: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """Tensor name → plain value (str, int, float, bool, or a list of them).

    ``options`` are RequestOptions; None counts as not given. Raises TypeError for an unknown name and InvalidRequest
    if there is not exactly one prompt, messages/tools are not JSON or a list is none. The server judges the rest.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown request option {sorted(unknown)[0]!r}; known: {', '.join(RequestOptions.__annotations__)}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    prompts = [name for name in PROMPTS if name in given]
    if len(prompts) != 1:
        found = " and ".join(prompts) if prompts else "none"
        raise InvalidRequest(f"a request needs exactly one of {', '.join(PROMPTS)}; {found} given")

    fields: dict[str, Any] = {"stream": stream}
    for name, value in given.items():
        tensor = TENSOR_NAMES.get(name, name)
        if name == "echo":
            fields[tensor] = not value
        elif name in ("messages", "tools"):
            fields[tensor] = _to_json(name, value)
        elif TENSORS[tensor].is_list:
            values = _to_list(name, value)
            if values or name == "input_ids":
                fields[tensor] = values
        else:
            fields[tensor] = value
    return fields


def _to_list(name: str, value: Any) -> list[Any]:
    """A single text is refused: as a sequence it would be its letters."""
    texts = TENSORS[name].datatype == "BYTES"
    try:
        values = None if isinstance(value, str | bytes) else list(value)
    except TypeError:
        values = None
    if values is None or (texts and not all(isinstance(v, str | bytes) for v in values)):
        raise InvalidRequest(
            f"{name} must be a list of {'texts' if texts else 'whole numbers'}; it is {shorten(value)}"
        )
    return values


def shorten(value: Any) -> str:
    """The value as an error message shows it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _to_json(name: str, value: Sequence[Mapping[str, Any]]) -> str:
    try:
        return json.dumps(list(value), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error
