"""Starts a tritonserver with the project's models, waits until it is ready, and stops it without a trace."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType

from irminsul_backend.config import MAX_SESSION_TTL_S, ServerConfig
from irminsul_backend.errors import ServerStartError
from irminsul_backend.logs import check_log_settings
from irminsul_backend.triton_io.sealing import SECRET_VARIABLE, new_secret
from irminsul_backend.triton_io.server.installation import (
    Installation,
    check_installation,
    environment,
    find_installation,
)
from irminsul_backend.triton_io.server.supervisor import EXIT_TIMEOUT_SECONDS, PATIENCE_SECONDS

MODEL = "irminsul"
LOCALHOST = "127.0.0.1"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
"""Triton's usual ports. IRMINSUL_HTTP_PORT, IRMINSUL_GRPC_PORT and IRMINSUL_METRICS_PORT name others."""
LEAST_VALUES = {
    "capacity_tokens": 0,
    "max_batch_tokens": 1,
    "max_running": 1,
    "max_waiting": 1,
    "max_waiting_per_namespace": 1,
    "step_target_ms": 0,
    "max_text_bytes": 1,
    "threads": 0,
    "stream_interval_ms": 0,
}
LEAST_CAPACITY = 64
"""Fewest slots of a KV pool whose size is given: one short question and its answer take as many."""
LOG_LINES = 400
NOISE = (
    "pinned_memory_manager",
    "CudaDriverHelper has not been initialized",
    "unable to create stream for",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "The previous sequence did not end before this sequence start",
)
"""What the server logs as warnings and errors on a machine without a GPU, and on a second START (clients are told)."""


@dataclass(frozen=True)
class Ports:
    """0 means any free one."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    @classmethod
    def from_env(cls, **defaults: int) -> Ports:
        """The ports named by IRMINSUL_HTTP_PORT and so on; what is unset comes from `defaults`, or is 0."""
        values = {}
        for name in PORTS:
            variable = f"IRMINSUL_{name.upper()}_PORT"
            text = os.environ.get(variable, "")
            if text and not text.isdecimal():
                raise ServerStartError(f"{variable}={text!r} is not a port number (0 = any free one)")
            values[name] = int(text) if text else defaults.get(name, 0)
        return cls(**values)


class Server:
    """A running server. Ends with :meth:`stop`, or with this process."""

    def __init__(self, process: subprocess.Popen[str], host: str, ports: Ports, shm_prefix: str, verbose: bool) -> None:
        self.process = process
        """The supervisor; tritonserver and its stubs are its descendants."""
        self.host = LOCALHOST if host == "0.0.0.0" else host
        self.ports = ports
        self.shm_prefix = shm_prefix
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._verbose = verbose
        self._stopping = False
        self._reader = threading.Thread(target=self._read_log, name="irminsul-server-log", daemon=True)
        self._reader.start()

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.ports.metrics}/metrics"

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.ports.http, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ServerStartError with what the server said if it ends, or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if self.process.poll() is not None:
                self._reader.join(timeout=2)
                raise ServerStartError(f"the server did not start: {explain(self.log)}")
            if time.monotonic() > deadline:
                raise ServerStartError(f"the server was not ready after {timeout_s:.0f} s: {explain(self.log)}")
            time.sleep(0.05)

    def wait(self) -> int:
        """Block until the server ends; returns its exit code."""
        return self.process.wait()

    def stop(self) -> None:
        """End the server and wait until its processes, ports and shared memory are gone. Safe to call again."""
        self._stopping = True
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=PATIENCE_SECONDS + 8)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=2)

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            # While it stops it only tells of sessions that were left open, which is no one's concern any more.
            if self._verbose or not (self._stopping or any(text in line for text in NOISE)):
                sys.stderr.write(line)
                sys.stderr.flush()


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """A signal handler: what Ctrl-C does, once; nothing may interrupt the cleaning up."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def find_model_repository() -> Path:
    """IRMINSUL_MODEL_REPOSITORY, else the checkout's folder, else the Docker image's."""
    named = os.environ.get("IRMINSUL_MODEL_REPOSITORY")
    if named:
        places = [Path(named)]
    else:
        places = [Path(__file__).resolve().parents[3] / "model_repository", Path("/opt/irminsul/model_repository")]
    for place in places:
        if (place / MODEL / "config.pbtxt").is_file():
            return place
    raise ServerStartError(
        f"no model repository at {' or '.join(map(str, places))}; name it with IRMINSUL_MODEL_REPOSITORY"
    )


def check_config(config: ServerConfig) -> None:
    """Refuse settings and model folders that cannot work, before anything starts.

    Raises ServerStartError or UnsupportedModelError with the field and its value.
    """
    from irminsul_backend.chunking import PRESETS
    from irminsul_backend.engine import resolve_device
    from irminsul_backend.model import load_config
    from irminsul_backend.text import ChatTemplate, Tokenizer

    if config.preset not in PRESETS:
        raise ServerStartError(f"preset is {config.preset!r}; it must be one of {', '.join(PRESETS)}")
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ServerStartError(f"{field.name} is {value}; it must be a finite number")
    for name, least in LEAST_VALUES.items():
        if getattr(config, name) < least:
            raise ServerStartError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    if 0 < config.capacity_tokens < LEAST_CAPACITY:
        raise ServerStartError(
            f"capacity_tokens is {config.capacity_tokens}; it must be at least {LEAST_CAPACITY}, or 0 (automatic)"
        )
    check_log_settings(config)
    resolve_device(config)
    if not 0 < config.session_ttl_s <= MAX_SESSION_TTL_S:
        raise ServerStartError(
            f"session_ttl_s is {config.session_ttl_s}; it must be over 0, at most {MAX_SESSION_TTL_S}"
        )
    load_config(config.model)
    Tokenizer.load(config.model)
    ChatTemplate.load(config.model)


def choose_ports(host: str, wanted: Ports) -> Ports:
    """Free ports in place of zeros. Raises ServerStartError naming a port in use and its flag."""
    given = [port for name in PORTS if (port := getattr(wanted, name))]
    if len(set(given)) < len(given):
        raise ServerStartError(f"the ports {', '.join(map(str, given))} must differ (0 = any free one)")
    with contextlib.ExitStack() as held:  # all are held until all are chosen, so that no two are the same
        chosen = {}
        for name in PORTS:
            port = getattr(wanted, name)
            listener = held.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
                listener.listen()
            except (OSError, OverflowError) as error:
                raise ServerStartError(
                    f"{name} port {port} on {host} cannot be used ({getattr(error, 'strerror', error)}); choose one "
                    f"with --{name}-port (0 = any free one) or IRMINSUL_{name.upper()}_PORT"
                ) from error
            chosen[name] = listener.getsockname()[1]
        return Ports(**chosen)


def start_server(
    config: ServerConfig,
    host: str = LOCALHOST,
    ports: Ports | None = None,
    verbose: bool = False,
    start_timeout_s: float = 900.0,
) -> Server:
    """Start a server and wait until it is ready. Raises ServerStartError or UnsupportedModelError with the remedy."""
    check_config(config)
    installation = find_installation()
    env = environment(installation, {**os.environ, **config.to_env(), "TOKENIZERS_PARALLELISM": "false"})
    env.setdefault(SECRET_VARIABLE, new_secret())
    check_installation(installation, env, config.max_text_bytes)
    repository = find_model_repository()
    chosen = choose_ports(host, ports if ports is not None else Ports.from_env())
    server = _spawn(installation, repository, env, host, chosen, verbose)
    try:
        server.wait_ready(start_timeout_s)
    except BaseException:
        server.stop()
        raise
    return server


@contextlib.contextmanager
def running_server(
    config: ServerConfig | None = None, ports: Ports | None = None, verbose: bool = False
) -> Iterator[Server]:
    """A server for the length of a `with`; its ports come from the environment or are free ones."""
    server = start_server(
        replace(ServerConfig.from_env(), log_level="WARNING") if config is None else config,
        ports=ports,
        verbose=verbose,
    )
    try:
        yield server
    finally:
        server.stop()


def _spawn(
    installation: Installation, repository: Path, env: dict[str, str], host: str, ports: Ports, verbose: bool
) -> Server:
    prefix = f"irminsul-{uuid.uuid4().hex[:12]}-"
    command = [
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-directory={installation.backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        f"--log-info={str(verbose).lower()}",
    ]
    for name in PORTS:
        command += [f"--{name}-address={host}", f"--{name}-port={getattr(ports, name)}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "irminsul_backend.triton_io.server.supervisor", prefix, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C at the terminal reaches the launcher only
    )
    return Server(process, host, ports, prefix, verbose)


def explain(log: deque[str]) -> str:
    """What a server's log says about why it did not start: each failed model's own words, else its last lines."""
    reasons = []
    for line in log:
        match = re.search(r"failed to load '(\w+)' version \d+: \w+: (.*)", line)
        if match:
            reasons.append(f"{match[1]}: " + match[2].split(r"\n\nAt:")[0].strip('" '))
    if not reasons:
        reasons = [line for line in log if re.match(r"E\d{4} |error:", line) and not any(n in line for n in NOISE)]
    return "; ".join(dict.fromkeys(reasons or list(log)[-5:])) or "it left no message"
