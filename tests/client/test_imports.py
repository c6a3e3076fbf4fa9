"""The client stands alone."""

from __future__ import annotations

import subprocess
import sys


def test_needs_neither_torch_nor_the_server() -> None:
    program = (
        "import sys, irminsul_client, irminsul_client.cli, irminsul_traffic.synthetic;"
        "bad = {'torch', 'irminsul_backend', 'irminsul_kernels', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
