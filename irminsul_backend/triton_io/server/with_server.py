"""Runs a command against a server of its own: `python -m irminsul_backend.triton_io.server.with_server COMMAND…`.

The command finds the addresses in IRMINSUL_URL (gRPC) and IRMINSUL_HTTP_URL. The exit code is the command's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from irminsul_backend.errors import IrminsulError
from irminsul_backend.triton_io.server.launcher import raise_interrupt, running_server


def main(command: list[str]) -> int:
    """Start a server as the environment describes it, run `command`, stop the server."""
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        with running_server() as server:
            env = {**os.environ, "IRMINSUL_URL": server.grpc_url, "IRMINSUL_HTTP_URL": server.http_url}
            return subprocess.run(command, env=env).returncode
    except IrminsulError as error:
        print(f"irminsul: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
