"""The client stands alone: none of its modules needs the server, the traffic package or what only those need."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
package, *blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))  # importing a name whose entry is None raises ModuleNotFoundError
found = [m.name for m in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")]
for name in found:
    importlib.import_module(name)
print(*found)
"""
BLOCKED = ("irminsul_backend", "irminsul_kernels", "irminsul_traffic", "rich", "zstandard", "torch", "transformers")


def test_every_module_of_the_client() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, "irminsul_client", *BLOCKED]
    result = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert {"irminsul_client.cli", "irminsul_client._http", "irminsul_client._grpc"} <= set(result.stdout.split())
