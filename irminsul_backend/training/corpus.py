"""The text that the shipped tokenizer is trained on: the running interpreter's standard library, and agent traffic.

The standard library is code plus English docstrings (PSF licence). The agent traffic is made up, see
:mod:`irminsul_traffic.agent_text`; the shipped model's lessons are filled with the same text.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from irminsul_traffic.agent_text import AgentText
from irminsul_traffic.words import PEOPLE, PERSON_ATTRIBUTES, RELATIONS, THING_ATTRIBUTES, THINGS, VALUES

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "ensurepip"}
MAX_FILE_BYTES = 300_000
NAMED = 2000
"""Repetitions of the names of facts: more than any rival pair of tokens has, so that each name becomes one token."""


def standard_library() -> Iterator[str]:
    """Every module's source, then its docstrings a second and third time: prose is rarer than code there."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.intersection(path.relative_to(root).parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        yield source
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text
                yield text


def language_reference() -> Iterator[str]:
    """The reference manual's pages that `help()` shows: English prose about code."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
        yield topics[name]


def documents(seed: int, generated: int) -> Iterator[str]:
    """Everything the tokenizer is trained on, in a fixed order."""
    yield from standard_library()
    yield from language_reference()
    yield from AgentText(seed).documents(generated)
    words = (*PEOPLE, *THINGS, *VALUES, *THING_ATTRIBUTES, *PERSON_ATTRIBUTES, *RELATIONS)
    yield f" {' '.join(words)}" * NAMED
