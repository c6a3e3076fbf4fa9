"""The four packages have one version, and each asks for the others at that version."""

from __future__ import annotations

import re
from pathlib import Path

import irminsul_client
import irminsul_kernels
import irminsul_traffic

import irminsul_backend

ROOT = Path(__file__).resolve().parents[1]


def test_all_packages_are_of_one_version() -> None:
    packages = (irminsul_backend, irminsul_client, irminsul_kernels, irminsul_traffic)
    assert {package.__version__ for package in packages} == {irminsul_backend.__version__}
    files = [ROOT / folder / "pyproject.toml" for folder in ("", "client", "kernels", "loadtest")]
    pins = [pin for file in files for pin in re.findall(r'"irminsul[a-z-]*==([^"]*)"', file.read_text())]
    assert len(pins) >= 4
    assert set(pins) == {irminsul_backend.__version__}
    assert all('dynamic = ["version"]' in file.read_text() for file in files)
