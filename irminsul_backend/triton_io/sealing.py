"""Seals what one of our models sends to another, so that no client can make it up.

Triton cannot hide a model: anybody may send tensors to `irminsul_engine`. What comes from our own models therefore
carries a keyed hash (BLAKE2b) over its tensors, and the engine and the detokenizer refuse everything else before they
read it. The key is a secret that lives as long as one server. `irminsul serve` hands it to the models' processes in
the environment. Under a plain `tritonserver` the first of these processes that needs the secret makes it, and leaves it
where the others, which have the same parent process, find it: in a file that only this user can read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from irminsul_backend.errors import InvalidRequestError, ServerStartError
from irminsul_backend.triton_io.tensors import TensorSpec, to_array

SECRET_VARIABLE = "IRMINSUL_SECRET"
SEAL_BYTES = 16
FOLDER = Path("/dev/shm")
"""Where a plain tritonserver's secret lies. Its models need this folder anyway, and it does not outlive the machine."""
PREFIX = "irminsul-secret-"


def seal(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `specs`, of which the last is a STRING and the others numbers, with the seal before it."""
    packet = _packet_name(specs)
    sealed: dict[str, Any] = {spec.name: to_array(spec, values[spec.name]) for spec in specs[:-1]}
    sealed[packet] = value.encode() if isinstance(value := values[packet], str) else value
    sealed[packet] = _hash(specs, sealed) + sealed[packet]
    return sealed


def unseal(specs: Sequence[TensorSpec], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given to :func:`seal`; raises InvalidRequestError unless this server sealed exactly that."""
    packet = _packet_name(specs)
    if all(spec.name in fields for spec in specs):
        opened = {**fields, packet: fields[packet][SEAL_BYTES:]}
        if hmac.compare_digest(_hash(specs, opened), fields[packet][:SEAL_BYTES]):
            return opened
    raise InvalidRequestError(
        f"{packet} does not come from this server; only its own models may call this one: send requests to the model "
        "'irminsul'"
    )


def _packet_name(specs: Sequence[TensorSpec]) -> str:
    """The last of the tensors: what the others belong to."""
    assert specs[-1].dtype == "STRING"
    return specs[-1].name


def _hash(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> bytes:
    """The name keeps a packet of one kind from being taken for another, the lengths a tensor's end from moving."""
    parts = [_packet_name(specs).encode()]
    for spec in specs:
        value = values[spec.name]
        data = value if isinstance(value, bytes) else value.tobytes()
        parts += (b":%d:" % len(data), data)
    return hashlib.blake2b(b"".join(parts), key=secret(), digest_size=SEAL_BYTES).digest()


def new_secret() -> str:
    """Make a secret, as the text that SECRET_VARIABLE holds."""
    return secrets.token_hex(32)


@functools.cache
def secret() -> bytes:
    """This server's secret. Raises ServerStartError if it cannot be had."""
    text = os.environ.get(SECRET_VARIABLE) or shared_secret(os.getppid())
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ServerStartError(f"{SECRET_VARIABLE} must be 16 to 64 bytes as hexadecimal digits; or leave it unset")
    return key


def shared_secret(server: int, folder: Path = FOLDER) -> str:
    """The secret that the child processes of `server`, a process id, share; the first that asks makes it.

    Raises ServerStartError if its file is somebody else's.
    """
    name = f"{PREFIX}{server}-{_start_time(server)}"
    _remove_leftovers(folder)
    path, draft = folder / name, folder / f"{name}-{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole or not at all: whoever loses this race reads the winner's
    finally:
        draft.unlink()
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
            raise ServerStartError(f"{path} was made by somebody else; remove it, or set {SECRET_VARIABLE}")
        return file.read()


def _start_time(process: int) -> str:
    """When the process began, in clock ticks since the machine's start: with the id, it names one process only."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def _remove_leftovers(folder: Path) -> None:
    """Remove the secrets of servers that are gone."""
    for path in folder.glob(f"{PREFIX}*"):
        server, start = path.name.removeprefix(PREFIX).split("-")[:2]
        with contextlib.suppress(OSError):
            try:
                alive = _start_time(int(server)) == start
            except (FileNotFoundError, ProcessLookupError):
                alive = False
            if not alive:
                path.unlink()
