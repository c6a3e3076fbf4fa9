"""Starts a tritonserver with the project's models, waits until it is ready, and stops it without a trace."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import ServerStartError
from irminsul_backend.triton_io.sealing import SECRET_VARIABLE, new_secret
from irminsul_backend.triton_io.server.addresses import (
    LOCALHOST,
    PORTS,
    Ports,
    choose_ports,
    is_listening,
    resolve_host,
)
from irminsul_backend.triton_io.server.installation import (
    Installation,
    check_installation,
    environment,
    find_installation,
)
from irminsul_backend.triton_io.server.leftovers import remove_leftovers
from irminsul_backend.triton_io.server.supervisor import CUT_OFF_CODE, PATIENCE_SECONDS

MODEL = "irminsul"
RESTRICTED_APIS = "shared-memory,model-repository,statistics,trace,logging"
"""Triton's APIs that no request needs: they reach into the server's memory and files, or show what others do."""
PROGRESS_SECONDS = 15
HTTP_SECONDS = 30
"""How long after gRPC, which Triton opens first, HTTP may take to be ready."""
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

    def wait_ready(self, timeout_s: float, http_timeout_s: float = HTTP_SECONDS) -> None:
        """Raises ServerStartError with what the server said if it ends, or is not ready in time.

        Args:
            http_timeout_s: how long after gRPC HTTP may take; Triton opens both once all models are loaded.
        """
        start = time.monotonic()
        deadline, progress, loaded = start + timeout_s, start + PROGRESS_SECONDS, False
        while not self.is_ready():
            now = time.monotonic()
            if self.process.poll() is not None:
                self._reader.join(timeout=2)
                raise ServerStartError(f"the server did not start: {explain(self.log)}")
            if not loaded and is_listening(self.host, self.ports.grpc):
                loaded, deadline = True, min(deadline, now + http_timeout_s)
            if now > deadline:
                what = f"answers on gRPC port {self.ports.grpc} but " if loaded else ""
                raise ServerStartError(
                    f"the server {what}is not ready at {self.http_url} after {now - start:.0f} s: {explain(self.log)}"
                )
            if now > progress:
                progress += PROGRESS_SECONDS
                print(f"irminsul: starting, {now - start:.0f} s so far; the model is loading", file=sys.stderr)
            time.sleep(0.05)

    def wait(self) -> int:
        """Block until the server ends; returns its exit code."""
        return self.process.wait()

    def drain(self, seconds: float) -> bool:
        """Let running requests finish, for `seconds` at most, while new ones are refused; then end the server.

        The server is not ready from the start on. Returns whether every request came to its end. An exception, such as
        KeyboardInterrupt, leaves the server as it is: call :meth:`stop` after it, which ends it at once.
        """
        self._stopping = True
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.write(f"drain {seconds} {self.host} {self.ports.http}\n")
                self.process.stdin.flush()
        return self.process.wait() != CUT_OFF_CODE

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
        remove_leftovers()  # the supervisor may have been killed

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
    set_handlers(signal.SIG_IGN)
    raise KeyboardInterrupt


def raise_interrupt_twice(number: int, frame: FrameType | None) -> None:
    """A signal handler for who drains at the first signal and ends at once at the second."""
    set_handlers(raise_interrupt)
    raise KeyboardInterrupt


def set_handlers(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set the handler of the signals that ask this process to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


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

    config.check()
    if config.preset not in PRESETS:
        raise ServerStartError(f"preset is {config.preset[:80]!r}; it must be one of {', '.join(PRESETS)}")
    resolve_device(config)
    load_config(config.model)
    Tokenizer.load(config.model)
    ChatTemplate.load(config.model)


def start_server(
    config: ServerConfig,
    host: str = LOCALHOST,
    ports: Ports | None = None,
    verbose: bool = False,
    start_timeout_s: float = 900.0,
) -> Server:
    """Start a server and wait until it is ready. Raises ServerStartError or UnsupportedModelError with the remedy."""
    check_config(config)
    host = resolve_host(host)
    installation = find_installation()
    remove_leftovers()
    env = environment(installation, {**os.environ, **config.to_env(), "TOKENIZERS_PARALLELISM": "false"})
    env.setdefault(SECRET_VARIABLE, new_secret())
    check_installation(installation, env, config.max_text_bytes)
    repository = find_model_repository()
    chosen = choose_ports(host, ports if ports is not None else Ports.from_env())
    server = _spawn(installation, repository, env, config, host, chosen, verbose)
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
    installation: Installation,
    repository: Path,
    env: dict[str, str],
    config: ServerConfig,
    host: str,
    ports: Ports,
    verbose: bool,
) -> Server:
    prefix = f"irminsul-{secrets.token_hex(6)}-"
    command = [
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-directory={installation.backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--disable-auto-complete-config",
        # Longer than a drain, within which the supervisor decides when the server stops.
        f"--exit-timeout-secs={math.ceil(config.drain_s) + PATIENCE_SECONDS}",
        f"--log-info={str(verbose).lower()}",
    ]
    for name in PORTS:
        command += [f"--{name}-address={host}", f"--{name}-port={getattr(ports, name)}"]
    if not config.open_triton_apis:
        # A header that nobody knows would be needed.
        key = f"{RESTRICTED_APIS}:{secrets.token_hex(8)}={secrets.token_hex(16)}"
        command += [f"--http-restricted-api={key}", f"--grpc-restricted-protocol={key}"]
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


def last_words(log: deque[str]) -> str:
    """Why a server that was ready has ended: what the supervisor saw, and the last complaint before that."""
    seen = [line.removeprefix("error: ") for line in log if line.startswith("error: ")][-1:]
    complaint = r"CRITICAL |ERROR |E\d{4} |Fatal |terminate called|\w*Error\b"
    said = [line for line in log if re.match(complaint, line) and not any(text in line for text in NOISE)][-1:]
    return "; ".join(line[:500] for line in (*seen, *said))
