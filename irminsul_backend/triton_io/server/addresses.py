"""The address and the ports that a server listens on."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from irminsul_backend.errors import ServerStartError

LOCALHOST = "127.0.0.1"
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
"""Triton's usual ports. IRMINSUL_HTTP_PORT, IRMINSUL_GRPC_PORT and IRMINSUL_METRICS_PORT name others."""


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
                raise ServerStartError(f"{variable}={text[:80]!r} is not a port number (0 = any free one)")
            values[name] = int(text) if text else defaults.get(name, 0)
        return cls(**values)


def resolve_host(host: str) -> str:
    """The IPv4 address of `host`; Triton takes a name for the address 255.255.255.255. Raises ServerStartError."""
    try:
        if not host:
            raise OSError("it is empty")
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ServerStartError(
            f"host is {host[:80]!r}, which has no IPv4 address ({error}); name an address of this machine, "
            f"{LOCALHOST} for itself only or 0.0.0.0 for all of its addresses"
        ) from error


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


def is_listening(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as client:
        client.settimeout(2)
        return client.connect_ex((host, port)) == 0
