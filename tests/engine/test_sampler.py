"""Sampling against distributions computed in float64 by their definitions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from irminsul_kernels.ops.sampling_reference import exponential_noise

from irminsul_backend.engine.sampler import Sampler, sample, sample_on_device
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

VOCAB = 12


def sampler(prompt: tuple[int, ...] = (), bad_words: Any = (), vocab: int = VOCAB, **params: Any) -> Sampler:
    request = GenerationRequest(
        key="k",
        return_log_probs=params.pop("return_log_probs", False),
        sampling=SamplingParams(**params),
        bad_words=bad_words,
    )
    return Sampler(request, np.array(prompt, np.int32), vocab)


def answered(one: Sampler, answer: list[int]) -> Sampler:
    for token in answer:
        one.accept(token)
    return one


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


def adjusted(
    logits: list[float], prompt: list[int], answer: list[int], bad_words: Any, p: SamplingParams
) -> np.ndarray:
    """Penalties and bad words by their definitions, float64."""
    z = np.array(logits, np.float32).astype(np.float64)
    for token in {*prompt, *answer}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token, count in Counter(answer).items():
        z[token] -= p.presence_penalty + count * p.frequency_penalty
    for *before, last in bad_words:
        if not before or answer[-len(before) :] == before:
            z[last] = -math.inf
    return z


def right_tokens(z: np.ndarray, p: SamplingParams, seed: int, draw: int, exact: bool) -> set[int]:
    """Every token that is right: one, or several that only float32's rounding of logits and parameters tells apart."""
    top = z.max()
    if top == -math.inf:
        return {0}
    near = 0.0 if exact else 4e-7 * np.abs(z[np.isfinite(z)]).max()
    if p.temperature == 0:
        return {int(z.argmax())} if exact else set(np.flatnonzero(z >= top - near).tolist())
    heat = float(np.float32(p.temperature))
    with np.errstate(over="ignore"):
        distance, blur = (z - top) / heat, near / heat
        slack = blur + 1e-5
        order = np.lexsort((np.arange(len(z)), -z))
        share = np.exp(distance)
        before = np.zeros(len(z))
        before[order[1:]] = np.cumsum(share[order])[:-1] / share.sum()
    rank = np.argsort(order)
    surely, maybe = np.ones(len(z), bool), z > -math.inf
    if p.top_k:
        surely &= (rank if exact else np.array([(z >= v - near).sum() - 1 for v in z])) < p.top_k
        maybe &= (rank if exact else np.array([(z > v + near).sum() for v in z])) < p.top_k
    if p.top_p < 1:
        # rounding may change the order of what is near: then any of it may be the one that the limit cuts
        first = rank == 0 if exact else z == top
        surely &= (first & ((z >= top - near).sum() == 1)) | (before < p.top_p * (1 - slack) - 1e-6) & (blur == 0)
        maybe &= (before < p.top_p * (1 + slack) + 1e-6) | (z >= top - near) | (not exact)
    least = math.log(p.min_p) if p.min_p else -math.inf
    surely &= distance >= least + slack
    surely[order[0]] |= exact
    maybe &= (distance >= least - slack) | (z >= top - near)
    columns = torch.tensor([seed - 2**64 if seed >= 2**63 else seed]), torch.tensor([draw])
    with np.errstate(invalid="ignore"):
        scores = distance - np.log(exponential_noise(*columns, len(z))[0].numpy())
    best = scores[surely].max() if surely.any() else -math.inf
    return set(np.flatnonzero(maybe & (scores >= best - 2 * slack)).tolist())


NUMBERS = st.floats(-50, 50, width=32).map(lambda x: round(x, 3)) | st.sampled_from(
    [0.0, -0.0, 1.0, 2.0, 30.0, -1e4, 1e4]
)
TOKENS = st.integers(0, VOCAB - 1)
TINY = 1.1754943508222875e-38


def range_of(low: float, high: float, *others: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32) | st.sampled_from([low, high, *others])


@st.composite
def cases(draw: st.DrawFn, penalties: bool) -> dict[str, Any]:
    params: dict[str, Any] = dict(
        temperature=draw(range_of(0, 100, 1e-38, 1e-45, 1e-6, 0.01, 0.7, 1.0)),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB, 2**31 - 1])),
        top_p=draw(range_of(TINY, 1, 1e-45, 0.5, 0.9999999)),
        min_p=draw(range_of(0, 1, 1e-38, 1e-45, 0.2)),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    if penalties:
        params |= dict(
            repetition_penalty=draw(range_of(0.125, 10, 1.0)),
            presence_penalty=draw(range_of(-2, 2, 0.0)),
            frequency_penalty=draw(range_of(-2, 2, 0.0)),
        )
    return dict(
        logits=draw(st.lists(NUMBERS, min_size=VOCAB, max_size=VOCAB)),
        prompt=draw(st.lists(TOKENS, max_size=4)) if penalties else [],
        answer=draw(st.lists(TOKENS, max_size=6)),
        bad_words=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=5)),
        params=params,
    )


class TestAgainstFloat64:
    """Every parameter in its whole range, a batch of such requests at once."""

    def check(self, batch: list[dict[str, Any]], exact: bool) -> None:
        samplers = [answered(sampler(tuple(c["prompt"]), c["bad_words"], **c["params"]), c["answer"]) for c in batch]
        tokens, _ = sample(torch.tensor([c["logits"] for c in batch]), samplers, False)
        for case, one, token in zip(batch, samplers, tokens, strict=True):
            z = adjusted(case["logits"], case["prompt"], case["answer"], case["bad_words"], one.params)
            assert token in right_tokens(z, one.params, one.seed, len(case["answer"]), exact), case

    @given(st.lists(cases(penalties=False), min_size=1, max_size=3))
    @settings(max_examples=300, deadline=None)
    def test_without_penalties(self, batch: list[dict[str, Any]]) -> None:
        self.check(batch, exact=True)

    @given(st.lists(cases(penalties=True), min_size=1, max_size=3))
    @settings(max_examples=300, deadline=None)
    def test_with_penalties(self, batch: list[dict[str, Any]]) -> None:
        self.check(batch, exact=False)

    @pytest.mark.parametrize(
        ("params", "right"),
        [
            (dict(temperature=1e-38), {2, 5}),
            (dict(temperature=1e-45, top_p=1e-45), {2}),
            (dict(temperature=1e-38, min_p=1.0), {2, 5}),
            (dict(temperature=100.0, top_k=2**31 - 1), set(range(VOCAB))),
            (dict(temperature=100.0, min_p=1e-45), set(range(VOCAB))),
            (dict(temperature=1.0, top_p=1e-45), {2}),
            (dict(temperature=1.0, top_p=1e-46), {2}),
        ],
        ids=str,
    )
    def test_the_ends_of_the_ranges(self, params: dict[str, Any], right: set[int]) -> None:
        logits = torch.tensor([1.0, 2.0, 3.0, 0.0, -1.0, 3.0, *[-2.0] * 6])
        found = {t for t, share in enumerate(frequencies(logits, 500, **params).tolist()) if share}
        assert found == right

    def test_top_p_ends_where_it_is_reached_exactly(self) -> None:
        found = frequencies(torch.zeros(VOCAB), 200, temperature=1.0, top_p=0.25)
        assert found.nonzero().flatten().tolist() == [0, 1, 2], "3 of 12 equal tokens, lowest ids first"

    def test_when_every_token_is_a_bad_word(self) -> None:
        one = sampler(bad_words=[[t] for t in range(VOCAB)], temperature=1.0, top_k=3, seed=1)
        assert sample(torch.zeros(1, VOCAB), [one], False)[0] == [0]

    def test_a_bad_word_of_ids_that_the_model_does_not_have_disturbs_nobody(self) -> None:
        logits = torch.zeros(2, VOCAB)
        sample(logits, [sampler(bad_words=[[VOCAB + 1], [-3], [1, VOCAB]]), sampler()], False)
        assert torch.equal(logits, torch.zeros(2, VOCAB))


class TestTheStream:
    """Seed and place in the answer decide, nothing else."""

    LOGITS = torch.randn(40, 300, generator=torch.Generator().manual_seed(4))

    def tokens(self, one: Sampler, beside: tuple[Sampler, ...] = (), log_probs: bool = False) -> list[int]:
        found = []
        for row in self.LOGITS:
            (*_, token), _ = sample(row.repeat(len(beside) + 1, 1), [*beside, one], log_probs)
            one.accept(token)
            found.append(token)
        return found

    def one(self, **more: Any) -> Sampler:
        return sampler(**(dict(temperature=1.0, seed=42, vocab=300) | more))

    def test_a_seed_fixes_it_whatever_else_is_in_the_batch(self) -> None:
        beside = (self.one(seed=1), self.one(temperature=0.0), self.one(top_k=3, presence_penalty=1.0))
        assert self.tokens(self.one()) == self.tokens(self.one(), beside)

    @pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
    def test_all_64_bits_of_the_seed_count(self, bit: int) -> None:
        assert self.tokens(self.one(seed=42)) != self.tokens(self.one(seed=42 ^ (1 << bit)))

    def test_what_leaves_the_distribution_alone_leaves_the_draws_alone(self) -> None:
        drawn = self.tokens(self.one())
        never = next(t for t in range(300) if t not in drawn)
        assert self.tokens(self.one(return_log_probs=True), log_probs=True) == drawn
        assert self.tokens(self.one(bad_words=[[never], [drawn[0], never], [never, drawn[1]]])) == drawn
        assert self.tokens(self.one(prompt=(1, 2), repetition_penalty=1.0, presence_penalty=-0.0)) == drawn
        assert self.tokens(self.one(top_k=300, top_p=1.0, min_p=0.0)) == drawn

    def test_replayed_tokens_do_not_change_the_next_ones(self) -> None:
        """A preempted request is computed again: what it had drawn is accepted, not drawn."""
        params: dict[str, Any] = dict(presence_penalty=0.5, bad_words=[[3, 4], [7]], top_p=0.9)
        drawn = self.tokens(self.one(**params))
        again = answered(self.one(**params), drawn[:25])
        for row, token in zip(self.LOGITS[25:], drawn[25:], strict=True):
            assert sample(row[None].clone(), [again], False)[0] == [token]
            again.accept(token)

    def test_tokens_of_one_answer_are_drawn_independently(self) -> None:
        one, counts = self.one(), Counter[int]()
        for _ in range(3000):
            ((token,), _) = sample(torch.zeros(1, 300), [one], False)
            one.accept(token)
            counts[token] += 1
        assert max(counts.values()) < 35  # 10 on average


@pytest.mark.interpreter
class TestByTheKernel:
    """The kernel, interpreted, draws what torch draws: with all settings in one batch, along an answer."""

    def test_the_same_tokens_on_both_paths(self) -> None:
        pytest.importorskip("triton")
        vocab, rng = 300, np.random.default_rng(8)
        settings_: list[dict[str, Any]] = [
            dict(temperature=0.0),
            dict(temperature=1.0),
            dict(temperature=1e-38),
            dict(temperature=1e-45, top_p=1e-45),
            dict(temperature=100.0, min_p=1e-38, top_k=2**31 - 1),
            dict(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
            dict(temperature=1.0, repetition_penalty=10.0, frequency_penalty=-2.0, presence_penalty=2.0),
            dict(temperature=1.0, repetition_penalty=0.125, bad_words=[[1], [2, 3]], top_p=0.999),
            dict(temperature=0.0, repetition_penalty=1.3, bad_words=[[5]], prompt=(5, 6, 7)),
        ]
        pairs = [
            [sampler(seed=2**64 - 1 - i * 2**40, vocab=vocab, **dict(s)) for i, s in enumerate(settings_)] for _ in "ab"
        ]
        for _ in range(12):
            logits = torch.from_numpy(rng.normal(0, 3, (len(settings_), vocab)).astype(np.float32)).bfloat16().float()
            ours, finite = sample_on_device(logits.clone(), pairs[0])
            theirs, _ = sample(logits, pairs[1], True)
            assert ours == theirs and all(finite)
            for samplers in pairs:
                for one, token in zip(samplers, ours, strict=True):
                    one.accept(token)


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
