"""The arrows between rooms run one way, those included that hide in a string."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("irminsul_backend", "client/irminsul_client", "kernels/irminsul_kernels", "loadtest/irminsul_traffic")
IMPORTERS = ("import_module", "__import__", "find_spec")
NAMES = tuple(package.rpartition("/")[2] for package in PACKAGES)


def test_imports_keep_to_the_contracts() -> None:
    """The contracts stand in pyproject.toml under [tool.importlinter]."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def dynamic_imports(source: str) -> list[str]:
    """Modules of ours that `source` imports by a string: import_module("..."), __import__("..."), find_spec("...")."""
    return [
        call.args[0].value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and (getattr(call.func, "attr", "") or getattr(call.func, "id", "")) in IMPORTERS
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).startswith(NAMES)
    ]


def test_no_import_hides_in_a_string() -> None:
    assert dynamic_imports('import_module("irminsul_backend.engine")') == ["irminsul_backend.engine"]
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert {str(f.relative_to(ROOT)): found for f in files if (found := dynamic_imports(f.read_text()))} == {}
