"""ModelFolder: the safetensors files of one model folder. Their headers are read at once, their tensors one by one.

A header is a few kilobytes to megabytes at the start of a file and holds names, dtypes and shapes, so what a folder of
600 GB holds is known within a second. Tensors are views of the memory-mapped file: reading one allocates nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import parse_json, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
"""Bytes of an element, by the format's name of its dtype."""
LISTED = 8
"""Most file or tensor names that one error message spells out."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header; the format's own limit."""


class _OpenFile(Protocol):
    """What `safetensors.safe_open` returns."""

    def get_tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says about one tensor."""

    shape: tuple[int, ...]
    dtype: str
    """The format's name: F32, BF16, F8_E4M3, ..."""
    num_bytes: int
    file: str
    """Name of the file in the folder."""


class ModelFolder:
    """Names, shapes and contents of a folder's tensors: model.safetensors, or the shards that an index lists."""

    def __init__(self, path: str | Path) -> None:
        """Read the headers; raises UnsupportedModelError if a file is missing, truncated or not in the format."""
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        """What the headers say of each tensor, by published name, in the files' order."""
        for name in _file_names(self.path):
            self.tensors |= read_header(self.path / name)
        self._open: dict[str, _OpenFile] = {}

    def read(self, name: str) -> torch.Tensor:
        """Return tensor `name` as stored; its memory is the mapped file's, so it must not be written."""
        from safetensors import safe_open

        file = self.tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(str(self.path / file), framework="pt", device="cpu")
        return self._open[file].get_tensor(name)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read what the header says of each tensor; raises UnsupportedModelError naming the file if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 0 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"{size} bytes cannot hold its header")
            entries = parse_json(file.read(length))
        if not isinstance(entries, dict):
            raise ValueError(f"its header is {shown(entries)}; it must be an object")
        tensors = {
            name: _tensor_info(name, entry, path.name) for name, entry in entries.items() if name != "__metadata__"
        }
        end = 8 + length + max((entry["data_offsets"][1] for n, entry in entries.items() if n in tensors), default=0)
        if end != size:
            raise ValueError(f"it holds {size} bytes, its header describes {end}")
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} is not a readable safetensors file: {error}; download it again") from error
    return tensors


def _tensor_info(name: str, entry: Any, file: str) -> TensorInfo:
    """Check one entry of a header; raises ValueError naming the tensor and the field."""
    fields = entry if isinstance(entry, dict) else {}
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    dtype = fields.get("dtype")
    for field, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
            raise ValueError(f"{field} of {name} is {shown(value)}; it must be a list of integers, 0 or more")
    if not isinstance(dtype, str):
        raise ValueError(f"dtype of {name} is {shown(dtype)}; it must be a string")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets of {name} is {shown(offsets)}; it must be a start and an end")
    info = TensorInfo(tuple(shape), dtype, offsets[1] - offsets[0], file)
    if info.dtype in FLOATS and info.num_bytes != prod(info.shape) * FLOATS[info.dtype]:
        raise ValueError(f"a tensor {list(info.shape)} of {info.dtype} has {info.num_bytes} bytes")
    return info


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX
    try:
        names = _indexed_files(parse_json(index.read_text(encoding="utf-8"))) if index.is_file() else [SINGLE]
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{index} is not a safetensors index: {error}; download it again") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        hint = f" (nor {INDEX})" if names == [SINGLE] else f" named in {INDEX}; download the rest"
        raise UnsupportedModelError(f"model folder {folder} lacks {', '.join(missing[:LISTED])}{more}{hint}")
    return names


def _indexed_files(index: Any) -> list[str]:
    """The shards that a parsed index names; raises ValueError if it is not an index."""
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise ValueError("it must be an object whose weight_map gives each tensor's file")
    for name, file in where.items():
        if not isinstance(file, str) or not file or "\0" in file:
            raise ValueError(f"weight_map gives {name} the file {shown(file)}; it must be a file's name")
    return sorted(set(where.values()))
