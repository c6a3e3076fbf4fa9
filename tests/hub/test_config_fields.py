"""FieldReader: every problem of an object is noted with field, value and limit, and reading goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.config_fields import MAX_NUMBER, MAX_SIZE, FieldReader

ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@given(ANYTHING)
def test_integer_returns_an_integer_in_range_whatever_it_reads(value: Any) -> None:
    read = FieldReader({"size": value})
    found = read.integer("size")
    assert type(found) is int and 1 <= found <= MAX_SIZE
    good = type(value) is int and 1 <= value <= MAX_SIZE
    assert (found == value and not read.problems) if good else ("size" in read.bad and len(read.problems) == 1)


@given(ANYTHING)
def test_number_returns_a_finite_positive_number_whatever_it_reads(value: Any) -> None:
    read = FieldReader({"scale": value})
    found = read.number("scale")
    assert math.isfinite(found) and found > 0
    good = type(value) in (int, float) and math.isfinite(value) and 1 / MAX_NUMBER <= value <= MAX_NUMBER
    assert (found == value and not read.problems) if good else bool(read.problems)


def test_null_and_missing_read_as_the_default() -> None:
    read = FieldReader({"a": None})
    assert [read.integer(name, 7) for name in ("a", "b")] == [7, 7]
    assert read.optional_integer("a") is None and read.value("b", "x") == "x"
    assert read.boolean("a", True) is True and read.choice("b", ("x", "y"), "y") == "y"
    assert not read.problems


@pytest.mark.parametrize(
    ("method", "arguments", "value", "said"),
    [
        ("integer", {}, None, "field is None; it must be an integer, at least 1"),
        ("integer", {"at_least": 0}, -1, "field is -1; it must be an integer, at least 0"),
        ("integer", {}, True, "field is True"),
        ("integer", {}, MAX_SIZE + 1, "at most 10,000,000"),
        ("number", {}, "1", "field is '1'; it must be a number over 0"),
        ("number", {"over": None}, -0.5, "it must be a number at least 0"),
        ("number", {}, 1e31, "it must be from 1e-30 to 1e"),
        ("boolean", {}, 1, "it must be true or false"),
        ("choice", {"understood": ("silu",)}, "gelu", "field is 'gelu'; understood: silu"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(method: str, arguments: dict[str, Any], value: Any, said: str) -> None:
    read = FieldReader({"field": value})
    getattr(read, method)("field", **arguments)
    assert said in read.problems[0] and read.bad == {"field"}


def test_a_missing_field_is_said_to_be_missing() -> None:
    read = FieldReader({})
    read.integer("size")
    assert read.problems == ["size is missing; it must be an integer, at least 1"]


def test_refuse_unless_takes_what_is_understood_and_what_is_not_there() -> None:
    read = FieldReader({"good": "silu", "wrong": "gelu"})
    for name in ("good", "wrong", "absent"):
        read.refuse_unless(name, ("silu", None))
    assert read.problems == ["wrong is 'gelu'; only 'silu' is understood"]


def test_inner_objects_share_the_problems_and_check_tells_all() -> None:
    outer = FieldReader({"a": 0})
    outer.integer("a")
    FieldReader({"b": 0}, "rope.", outer.problems).integer("b")
    with pytest.raises(UnsupportedModelError, match=r"config\.json: a is 0; .*; also rope\.b is 0; "):
        outer.check("config.json")
    FieldReader({}).check("config.json")
