"""The server's settings: one frozen dataclass, carried to the Triton stubs by environment variables.

`irminsul serve` turns its flags into variables with :meth:`ServerConfig.to_env`; the Triton models read them back with
:meth:`ServerConfig.from_env`. A Docker deployment sets the same variables.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from irminsul_backend.errors import ServerStartError

DEMO_MODEL = Path(__file__).parent / "demo_model"
MAX_SESSION_TTL_S = 3600.0
PREFIX = "IRMINSUL_"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""What a variable of a yes-or-no setting may hold, in any case."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server; each field is the environment variable ``IRMINSUL_<NAME>``."""

    model: str = str(DEMO_MODEL)
    """Hugging Face model folder."""
    preset: str = "default"
    """Chunking preset, see ``irminsul_backend.chunking.PRESETS``."""
    device: str = "auto"
    """``auto`` | ``cpu`` | ``cuda`` | ``cuda:N``."""
    dtype: str = "auto"
    """``auto`` (float32 on CPU, bfloat16 on GPU) | ``float32`` | ``bfloat16`` | ``float16``."""
    capacity_tokens: int = 0
    """Slots in the KV pool; one slot holds one token's rows of all layers. 0 = as many as the memory has room for."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that weights, a step's workspace and the KV pool may take together."""
    max_batch_tokens: int = 1024
    """Most tokens (prefill and decode together) in one forward pass."""
    max_running: int = 64
    """Most requests that are being prefilled or decoded at once; more wait their turn."""
    max_waiting: int = 4096
    """Most requests that wait for their turn; the server refuses further ones until some have begun."""
    max_waiting_per_namespace: int = 2048
    """Most of them in one namespace (the requests of one ``cache_salt``, or those without any), so that one tenant
    cannot fill the queue."""
    step_target_ms: float = 0.0
    """While answers are being written, prompts are computed in slices so small that a step takes about this long: the
    longest time between two tokens of a stream. 0 = 50 ms on a GPU, 250 ms on the CPU."""
    max_text_bytes: int = 4 * 1024 * 1024
    """Largest prompt text, in bytes of UTF-8."""
    stream_interval_ms: float = 30.0
    """Tokens that follow the request's former response within this time wait for it to pass and go out as one response:
    a response costs the server more than a millisecond of CPU. 0 = every token at once."""
    session_ttl_s: float = 600.0
    """An idle session is forgotten after this long."""
    require_cache_salt: bool = False
    """If set, a request without a cache_salt shares rows with its own session only."""
    threads: int = 0
    """torch threads of the engine; 0 = one per core."""
    log_level: str = "INFO"
    log_format: str = "text"
    """``text`` | ``json`` (one object a line)."""
    log_ids: str = "hashed"
    """How request keys and session ids, which clients choose, stand in the log: ``hashed`` (short; keyed anew at each
    start of the server, the same in all of its processes) | ``plain``."""
    escape_special_tokens: bool = False
    """If set, what is written like a special token is text in `text_input` too, unless the request allows it
    (`allow_special_tokens`)."""

    @classmethod
    def from_env(cls, env: dict[str, str] | None = None) -> ServerConfig:
        """Read ``IRMINSUL_*`` variables; raises ServerStartError naming variable and value if one does not parse."""
        source = os.environ if env is None else env
        values: dict[str, object] = {}
        defaults = cls()
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            text = source.get(name)
            if text is None or text == "":
                continue
            kind = type(getattr(defaults, field.name))
            try:
                values[field.name] = SWITCH[text.strip().lower()] if kind is bool else kind(text)
            except KeyError:
                raise ServerStartError(f"{name}={text!r} must be one of {', '.join(SWITCH)}, or empty") from None
            except ValueError as error:
                raise ServerStartError(f"{name}={text!r} is not a valid {kind.__name__}") from error
            if kind is float and not math.isfinite(values[field.name]):  # type: ignore[arg-type]
                raise ServerStartError(f"{name}={text!r} is not a finite number")
        return cls(**values)  # type: ignore[arg-type]

    def to_env(self) -> dict[str, str]:
        """The variables that make :meth:`from_env` return this configuration."""
        return {
            PREFIX + f.name.upper(): str(int(v)) if isinstance(v := getattr(self, f.name), bool) else str(v)
            for f in fields(self)
        }
