"""What is made from the table of inputs is as the table would make it now."""

from __future__ import annotations

from pathlib import Path

import pytest

from irminsul_backend.commands.generated_files import COMMAND, ROOT, generated_files


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_it_is_not_stale(path: Path) -> None:
    assert path.read_text() == generated_files()[path], f"{path.name} is stale; run {COMMAND}"
