"""The server's settings: one frozen dataclass, carried to the Triton stubs by environment variables.

`irminsul serve` turns its flags into variables with :meth:`ServerConfig.to_env`; the Triton models read them back with
:meth:`ServerConfig.from_env`. A Docker deployment sets the same variables. Flags, their help, the ranges that are
checked and docs/settings.md all follow the fields of :class:`ServerConfig`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from irminsul_backend.errors import ServerStartError

DEMO_MODEL = Path(__file__).parent / "demo_model"
PREFIX = "IRMINSUL_"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""What a variable of a yes-or-no setting may hold, in any case."""
MAX_SESSION_TTL_S = 3600.0
"""Longest time that an idle session may be kept."""


@dataclass(frozen=True)
class Setting:
    """What is known of one field of :class:`ServerConfig`, beside its name, type and default."""

    doc: str
    """What it sets, for `--help` and the docs."""
    advice: str = ""
    """When to change it, for the docs."""
    low: float | None = None
    above: float | None = None
    """Bound that the value must exceed."""
    high: float | None = None
    zero: str = ""
    """What 0 means where that is allowed although it is under `low`."""
    choices: tuple[str, ...] = ()
    """The texts allowed; empty allows any, which whoever reads the setting checks."""
    metavar: str = ""
    """Stands for the value in `--help`; "" where the setting is no flag or takes no value."""

    @property
    def limit(self) -> str:
        """The range in words; "" where every value of the type is allowed."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = ("at least", self.low), ("over", self.above), ("at most", self.high)
        words = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        return f"{words}, or 0 ({self.zero})" if self.zero else words

    def check(self, name: str, value: Any) -> None:
        """Raise ServerStartError with value and range if `value`, of the right type, may not be set."""
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                raise ServerStartError(f"{name} is {value[:80]!r}; it must be {self.limit}")
            return
        if not math.isfinite(value):
            raise ServerStartError(f"{name} is {value}; it must be a finite number")
        inside = (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )
        if not inside and not (self.zero and value == 0):
            raise ServerStartError(f"{name} is {value}; it must be {self.limit}")


def _setting(default: Any, doc: str, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(doc, **more)})


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server; each field is the environment variable ``IRMINSUL_<NAME>``."""

    model: str = _setting(
        str(DEMO_MODEL),
        "Hugging Face model folder; without it the small model that ships with Irminsul",
        metavar="DIR",
    )
    preset: str = _setting("default", "how prompts are cut into chunks: default or paper", metavar="NAME")
    device: str = _setting("auto", "where the model runs: auto, cpu, cuda or cuda:N", metavar="NAME")
    dtype: str = _setting(
        "auto",
        "type of weights and cache: auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16",
        choices=("auto", "float32", "bfloat16", "float16"),
        metavar="NAME",
    )
    capacity_tokens: int = _setting(
        0,
        "slots of the KV cache; one holds one token's rows of all layers",
        advice="`irminsul inspect DIR` gives the bytes of a slot. Set it where other programs share the memory.",
        low=64,  # one short question and its answer
        high=2**31 - 1,
        zero="sized to the memory",
        metavar="N",
    )
    gpu_memory_fraction: float = _setting(
        0.9,
        "share of the GPU's memory for weights, a step's workspace and the KV cache together",
        advice="Lower it where another process uses the same GPU.",
        above=0,
        high=1,
        metavar="SHARE",
    )
    max_batch_tokens: int = _setting(
        1024,
        "most tokens, prefill and decode together, in one forward pass",
        advice="More makes prefill faster on a GPU and the gaps between a stream's tokens longer.",
        low=1,
        high=131072,
        metavar="N",
    )
    max_running: int = _setting(
        64,
        "most requests that are being prefilled or decoded at once; more wait",
        advice="Each one running costs every other one time per token.",
        low=1,
        high=1024,
        metavar="N",
    )
    max_waiting: int = _setting(
        4096,
        "most requests that wait for their turn; further ones are refused until some have begun",
        advice="Lower it where a late answer is worth less than a quick refusal.",
        low=1,
        high=1_000_000,
        metavar="N",
    )
    max_waiting_per_namespace: int = _setting(
        2048,
        "most of the waiting requests with the same cache_salt, or without any",
        advice="It keeps one tenant from filling the queue.",
        low=1,
        high=1_000_000,
        metavar="N",
    )
    step_target_ms: float = _setting(
        0.0,
        "longest time between two tokens of a stream while prompts are computed, which it cuts into slices",
        advice="More makes prefill faster beside running streams.",
        low=0,
        high=60_000,
        zero="50 on a GPU, 250 on a CPU",
        metavar="MS",
    )
    max_text_bytes: int = _setting(
        4 * 1024 * 1024,
        "largest prompt text, in bytes of UTF-8",
        advice="/dev/shm needs eight times as much and 16 MiB more. Lower it to what your longest prompt needs.",
        low=1,
        high=2**28,
        metavar="N",
    )
    stream_interval_ms: float = _setting(
        30.0,
        "least time between two responses of a stream; tokens that come within it go out together, 0 sends each alone",
        advice="A response costs the server more than a millisecond of CPU.",
        low=0,
        high=60_000,
        metavar="MS",
    )
    session_ttl_s: float = _setting(
        600.0,
        "time after which an idle session is forgotten",
        advice="Cached rows stay; a request to the session is told that it expired.",
        above=0,
        high=MAX_SESSION_TTL_S,
        metavar="SECONDS",
    )
    require_cache_salt: bool = _setting(
        False,
        "let a request without a cache_salt reuse the rows of its own session only",
        advice="Set it where clients must not learn from `usage` what others have sent.",
    )
    threads: int = _setting(0, "CPU threads of the engine; 0 is one per core", low=0, high=1024, metavar="N")
    log_level: str = _setting(
        "INFO",
        "least severity that the models log; `irminsul serve` sets WARNING, or INFO with `--verbose`",
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    )
    log_format: str = _setting("text", "lines of the log: text or json", choices=("text", "json"), metavar="FORM")
    log_ids: str = _setting(
        "hashed",
        "request keys and session ids in the log: hashed or plain",
        advice="Clients choose them. Hashes are keyed anew at each start and alike in all processes of a server.",
        choices=("hashed", "plain"),
        metavar="HOW",
    )
    drain_s: float = _setting(
        30.0,
        "time that running requests have to finish after SIGTERM or SIGINT; 0 ends them at once",
        advice="Keep it under what Docker (`stop_grace_period`) or Kubernetes (`terminationGracePeriodSeconds`) "
        "waits before it kills, by 15 seconds.",
        low=0,
        high=3600,
        metavar="SECONDS",
    )
    open_triton_apis: bool = _setting(
        False,
        "answer Triton's shared-memory, model-repository, statistics, trace and logging APIs",
        advice="Only for trusted clients, such as perf_analyzer: through them a client reads and writes the server's "
        "memory, writes its log to any file and sees what others do.",
    )

    escape_special_tokens: bool = _setting(
        False,
        "read special tokens in text_input as text, as in messages, unless the request allows them",
        advice="Set it where `text_input` holds what users typed.",
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, given: Mapping[str, Any] | None = None) -> ServerConfig:
        """Read ``IRMINSUL_*`` variables. Raises ServerStartError naming variable or setting, value and range.

        Args:
            given: values by field name that come before a variable, which is not read then.
        """
        source = os.environ if env is None else env
        values: dict[str, Any] = dict(given or {})
        for item in fields(cls):
            text = source.get(PREFIX + item.name.upper())
            if item.name not in values and text:
                values[item.name] = _parse(PREFIX + item.name.upper(), text, type(item.default))
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raise ServerStartError with name, value and range if a setting is out of range."""
        for name, setting in SETTINGS.items():
            setting.check(name, getattr(self, name))

    def to_env(self) -> dict[str, str]:
        """The variables that make :meth:`from_env` return this configuration."""
        return {
            PREFIX + f.name.upper(): str(int(v)) if isinstance(v := getattr(self, f.name), bool) else str(v)
            for f in fields(self)
        }


SETTINGS: dict[str, Setting] = {f.name: f.metadata["setting"] for f in fields(ServerConfig)}
"""Every setting by its name, in the order of the docs."""


def _parse(variable: str, text: str, kind: Any) -> Any:
    try:
        value = SWITCH[text.strip().lower()] if kind is bool else kind(text)
    except KeyError:
        raise ServerStartError(f"{variable}={text[:80]!r} must be one of {', '.join(SWITCH)}, or empty") from None
    except ValueError as error:
        raise ServerStartError(f"{variable}={text[:80]!r} is not a valid {kind.__name__}") from error
    if kind is float and not math.isfinite(value):
        raise ServerStartError(f"{variable}={text[:80]!r} is not a finite number")
    return value
