"""The examples of the package's README run as they stand there, on the CPU, and give the shapes they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

README = Path(__file__).parents[2] / "kernels" / "README.md"


def test_the_examples_run_one_after_another() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    shapes = []
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        shapes.append(tuple(names["out"].shape))
    assert shapes[:4] == [(1, 4, 32), (2, 4, 512), (5, 4, 512), (100, 4, 32)]
    assert not names["out"].isnan().any()
    assert names["inner"].shape == (3, 1408) and names["tokens"].shape == (2,)
