"""Sampling against distributions computed in float64 by their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from irminsul_backend.engine.sampler import Sampler, sample
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

VOCAB = 12


def sampler(prompt: tuple[int, ...] = (), bad_words: Any = (), **params: Any) -> Sampler:
    request = GenerationRequest(key="k", sampling=SamplingParams(**params), bad_words=bad_words)
    return Sampler(request, np.array(prompt, np.int32), VOCAB)


def frequencies(logits: torch.Tensor, draws: int = 4000, **params: Any) -> torch.Tensor:
    samplers = [sampler(seed=i, **params) for i in range(draws)]
    tokens, _ = sample(logits.repeat(draws, 1), samplers, False)
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB).double() / draws


def expected(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    p = torch.softmax(logits.double() / temperature, 0)
    order = p.argsort(descending=True).tolist()
    kept, total = [], 0.0
    for rank, token in enumerate(order):
        if (top_k and rank >= top_k) or total >= top_p or p[token] < min_p * p[order[0]]:
            break
        kept.append(token)
        total += p[token].item()
    out = torch.zeros(VOCAB, dtype=torch.float64)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=2.0, top_k=3),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=1.0, min_p=0.3),
        dict(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1),
        dict(temperature=1.0, top_p=1e-9),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    want, got = expected(logits, **params), frequencies(logits, **params)
    assert (got[want == 0] == 0).all(), "a token outside the limits was drawn"
    assert (got - want).abs().max() < 0.04  # five standard deviations of 4,000 draws


def test_a_seed_fixes_the_stream_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(4))
    alone, beside = sampler(temperature=1.0, seed=42), sampler(temperature=1.0, seed=42)
    others = [sampler(temperature=1.0, seed=1), sampler()]
    for row in logits:
        (a,), _ = sample(row[None].clone(), [alone], False)
        (_, b, _), _ = sample(row.repeat(3, 1), [others[0], beside, others[1]], False)
        assert a == b


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(3, VOCAB)
    tokens, log_probs = sample(logits.clone(), [sampler(), sampler(temperature=1.0, top_k=1), sampler()], True)
    assert tokens == logits.argmax(1).tolist()
    assert log_probs == pytest.approx(torch.log_softmax(logits, 1).max(1).values.tolist())


def test_log_probs_are_the_models_own() -> None:
    logits = torch.randn(1, VOCAB)
    one = sampler(temperature=0.7, top_k=4, repetition_penalty=1.5, prompt=(0, 1, 2), seed=5)
    (token,), (log_prob,) = sample(logits.clone(), [one], True)
    assert log_prob == pytest.approx(torch.log_softmax(logits[0], 0)[token].item())


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, *[-9.0] * 8])
    one = sampler(prompt=(0, 1), repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    for token in (2, 2, 3):
        one.accept(token)
    row = logits.clone()
    one.adjust(row)
    assert row[:4].tolist() == pytest.approx([1.0, -4.0, 0.5 - 1.0 - 0.25, 0.25 - 0.5 - 0.25])
    assert torch.equal(row[4:], logits[4:])


def test_bad_words_are_not_completed() -> None:
    one = sampler(bad_words=[[4], [5, 6], [7, 8, 9]])
    row = torch.zeros(VOCAB)
    one.adjust(row)
    assert row.isinf().nonzero().flatten().tolist() == [4]
    for token in (7, 8):
        one.accept(token)
    row = torch.zeros(VOCAB)
    one.adjust(row)
    assert row.isinf().nonzero().flatten().tolist() == [4, 9]
    one.accept(5)
    row = torch.zeros(VOCAB)
    one.adjust(row)
    assert row.isinf().nonzero().flatten().tolist() == [4, 6]
