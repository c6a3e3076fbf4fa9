"""The traffic package needs the client and nothing else of Irminsul."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
import irminsul_traffic
blocked = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked))  # importing a name whose entry is None raises ModuleNotFoundError
found = [m.name for m in pkgutil.iter_modules(irminsul_traffic.__path__, "irminsul_traffic.")]
for name in found:
    importlib.import_module(name)
print(*found)
"""


def test_every_module_of_the_package_and_its_docstring_names_it() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, "irminsul_backend", "irminsul_kernels", "torch", "tokenizers"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    import irminsul_traffic

    names = {name.rpartition(".")[2] for name in result.stdout.split()} - {"__main__"}
    described = {line.split("``")[1] for line in str(irminsul_traffic.__doc__).splitlines() if line.startswith("- ``")}
    assert described == names
