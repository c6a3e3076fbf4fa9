"""Penalties and bad words: their values, and that a step takes as many operations for 64 requests as for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from irminsul_backend.engine.adjustment import Adjustment, BadWords, adjust
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

VOCAB = 12


def adjustment(
    prompt: Any = (), bad_words: Any = (), answer: Any = (), vocab: int = VOCAB, **params: Any
) -> Adjustment:
    request = GenerationRequest(key="k", sampling=SamplingParams(**params), bad_words=bad_words)
    one = Adjustment(request, np.array(prompt, np.int32), vocab)
    for token in answer:
        one.accept(token)
    return one


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, *[-9.0] * 8])
    rows = logits.repeat(3, 1)
    one = dict(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    adjust(
        rows,
        [
            adjustment((0, 1, 1), answer=(2, 2, 3), **one),
            adjustment((0, 1), answer=(2, 2, 3)),
            adjustment((0, 2), answer=(2, 2, 3), repetition_penalty=2.0),
        ],
    )
    assert rows[0, :4].tolist() == pytest.approx([1.0, -4.0, 0.5 - 1.0 - 0.25, 0.25 - 0.5 - 0.25])
    assert torch.equal(rows[0, 4:], logits[4:])
    assert torch.equal(rows[1], logits), "no penalties"
    assert rows[2, :4].tolist() == [1.0, -2.0, 0.5, 0.25], "once, though 2 is in prompt and answer"


class TestBadWords:
    def test_are_not_completed(self) -> None:
        words = BadWords([[4], [5, 6], [7, 8, 9]])
        assert words.banned().tolist() == [4]
        for token, banned in ((7, {4}), (8, {4, 9}), (5, {4, 6}), (5, {4, 6}), (6, {4})):
            words.accept(token)
            assert set(words.banned().tolist()) == banned

    @given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8), st.lists(st.integers(0, 2), max_size=20))
    def test_words_that_overlap_themselves_and_each_other(self, words: list[list[int]], answer: list[int]) -> None:
        found = BadWords(words)
        for n in range(len(answer) + 1):
            want = {w[-1] for w in words if w and answer[:n][n - len(w) + 1 :] == w[:-1] and n >= len(w) - 1}
            assert set(found.banned().tolist()) == want
            if n < len(answer):
                found.accept(answer[n])


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_as_many_operations_for_64_requests_as_for_one() -> None:
    rng = np.random.default_rng(0)

    def operations(requests: int, words: int) -> int:
        adjustments = [
            adjustment(
                rng.integers(0, 500, 100), [*rng.integers(0, 500, (words, 3)).tolist(), [1]], rng.integers(0, 500, 9),
                500, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
            )
            for _ in range(requests)
        ]  # fmt: skip
        logits = torch.zeros(requests, 500)
        adjust(logits, adjustments)
        with Operations() as counted:
            adjust(logits, adjustments)
        return counted.count

    one = operations(1, 1)
    assert 0 < one < 60
    assert operations(64, 256) == one
