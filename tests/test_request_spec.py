"""The table of inputs: ranges, their words, and that the parts of the server agree with it."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import InvalidRequestError, shown
from irminsul_backend.request_spec import BY_NAME, INPUTS, SAMPLING_INPUTS, Input, SamplingParams

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def accepts(spec: Input, value: object) -> bool:
    try:
        spec.check(value)
    except InvalidRequestError as error:
        assert str(error) == f"{spec.name} is {value!r}; it must be {spec.limit}"
        return False
    return True


class TestRange:
    @given(low=st.floats(-10, 10), width=st.floats(0, 10), value=NUMBERS)
    def test_a_closed_range(self, low: float, width: float, value: float) -> None:
        spec = Input("x", "FP32", "", low=low, high=low + width)
        assert accepts(spec, value) == (low <= value <= low + width)

    @given(above=st.floats(-10, 10), value=NUMBERS)
    def test_an_open_bound_is_excluded_and_infinity_is_no_number(self, above: float, value: float) -> None:
        assert accepts(Input("x", "FP32", "", above=above), value) == (math.isfinite(value) and value > above)

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            (Input("x", "FP32", ""), "a finite number"),
            (Input("x", "FP32", "", low=0, note="0 is greedy"), "a finite number, at least 0 (0 is greedy)"),
            (Input("x", "FP32", "", above=0), "a finite number over 0"),
            (Input("x", "FP32", "", above=0, high=1), "over 0 and at most 1"),
            (Input("x", "INT32", "", low=0, high=7), "between 0 and 7"),
            (Input("x", "INT32", "", low=1), "at least 1"),
            (Input("x", "STRING", "", choices=("a", "b")), "one of a, b"),
        ],
    )
    def test_in_words(self, spec: Input, words: str) -> None:
        assert spec.limit == words


class TestTable:
    def test_names_and_options_are_unique(self) -> None:
        assert len(BY_NAME) == len(INPUTS)
        options = [spec.option or spec.name for spec in INPUTS if spec.option is not None]
        assert len(set(options)) == len(options)

    def test_every_default_is_allowed(self) -> None:
        for spec in INPUTS:
            if spec.default is not None:
                spec.check(spec.default)

    def test_the_ends_of_a_range_are_allowed_as_the_float32_that_comes_over_the_wire(self) -> None:
        for spec in SAMPLING_INPUTS:
            if spec.dtype == "FP32":
                for end in (spec.low, spec.high):
                    assert end is None or accepts(spec, float(np.float32(end)))

    def test_the_sampling_parameters_are_the_dataclass(self) -> None:
        assert [(s.name, s.default) for s in SAMPLING_INPUTS] == [(f.name, f.default) for f in fields(SamplingParams)]

    @pytest.mark.parametrize(("name", "value"), [("top_p", 0.0), ("max_tokens", 0), ("seed", -1), ("min_p", math.nan)])
    def test_parameters_out_of_range_are_refused(self, name: str, value: float) -> None:
        with pytest.raises(InvalidRequestError, match=f"{name} is "):
            BY_NAME[name].check(value)


class TestLengths:
    @pytest.mark.parametrize("name", ["cache_salt", "cancel_key", "session_id"])
    def test_names_are_bounded_in_bytes(self, name: str) -> None:
        spec = BY_NAME[name]
        limit = spec.max_bytes
        assert limit is not None
        spec.check("é" * (limit // 2))
        with pytest.raises(InvalidRequestError, match=rf"{name} is {limit + 2} bytes long; at most {limit} bytes"):
            spec.check("é" * (limit // 2 + 1))

    @pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, list(range(10**5)), "\U0001f642" * 10**5])
    def test_values_in_errors_are_cut(self, value: object) -> None:
        assert len(shown(value)) < 150
        assert shown(value).endswith(")")

    def test_short_values_are_whole(self) -> None:
        assert shown("it's") == '"it\'s"'
        assert shown([1, "a"]) == "[1, 'a']"
