"""The sampling kernel against a float64 sort with the same noise, and against the probabilities it should follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from irminsul_kernels.ops.sampling import sample
from irminsul_kernels.ops.sampling_reference import exponential_noise, random_words, sample_reference

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
DTYPES = dict(
    temperature=torch.float32, top_k=torch.int32, top_p=torch.float32, min_p=torch.float32, seeds=torch.int64,
    draws=torch.int64,
)  # fmt: skip


def columns(rows: int, seed: int = 7, **settings: float) -> dict[str, torch.Tensor]:
    values = OFF | settings
    found = {name: torch.full((rows,), value, dtype=DTYPES[name]) for name, value in values.items()}
    return found | dict(seeds=torch.full((rows,), seed), draws=torch.arange(rows))


def random_logits(rows: int, vocab: int, narrow: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    return logits.bfloat16().float() if narrow else logits


SETTINGS = [
    {},
    dict(temperature=0.0),
    dict(temperature=0.3),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_p=0.5),
    dict(top_p=1e-6),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(min_p=1e-38, top_k=2**31 - 1),
    dict(temperature=1e-30),
    dict(temperature=1e-30, min_p=1.0, top_p=0.4),
    dict(temperature=100.0, top_p=0.9999999),
    dict(top_p=1.2e-38),
    dict(temperature=1.7, top_k=40, top_p=0.9, min_p=0.02),
]


@pytest.mark.interpreter
class TestKernel:
    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    def test_agrees_with_the_sort(self, settings: dict[str, float]) -> None:
        """Logits that were bf16 have many equals, among them at the threshold."""
        logits = torch.cat((random_logits(3, 300), random_logits(4, 300, narrow=True)))
        arguments = columns(7, **settings)
        assert sample(logits, **arguments).tolist() == sample_reference(logits, **arguments).tolist()

    def test_rows_have_their_own_settings(self) -> None:
        rows = [OFF | s for s in SETTINGS]
        arguments = {k: torch.tensor([r[k] for r in rows], dtype=DTYPES[k]) for k in OFF}
        arguments |= dict(seeds=torch.arange(len(rows)) - 2**40, draws=torch.arange(len(rows)) + 2**33)
        logits = random_logits(len(rows), 9000)
        assert sample(logits, **arguments).tolist() == sample_reference(logits, **arguments).tolist()

    def test_equal_logits_are_kept_in_order_of_their_ids(self) -> None:
        logits = torch.full((12, 200), -1.0)
        logits[:, 50] = 0
        assert set(sample(logits, **columns(12, top_k=3)).tolist()) == {50, 0, 1}

    def test_what_is_banned_is_never_drawn(self) -> None:
        logits = torch.full((10, 150), -math.inf)
        logits[:, [3, 140]] = torch.tensor([-0.0, 0.0])
        logits[:, 7] = math.nan
        assert set(sample(logits, **columns(10)).tolist()) == {3, 140}
        assert sample(torch.full((1, 150), -math.inf), **columns(1)).tolist() == [0]

    def test_a_stream_depends_on_seed_and_draws_alone(self) -> None:
        logits = random_logits(1, 300).expand(4, -1).contiguous()
        tokens = sample(logits, **columns(4, top_k=50))
        order = torch.tensor([3, 0, 2, 1])
        shuffled = {k: v[order] for k, v in columns(4, top_k=50).items()}
        assert sample(logits, **shuffled).tolist() == tokens[order].tolist()
        assert sample(logits, **columns(4, seed=8, top_k=50)).tolist() != tokens.tolist()


@pytest.mark.parametrize(
    ("seed", "draw", "words"),
    [
        (0, 0, ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]),
        (-1, 2**32 - 1, ["69d460b8", "422820ce", "c6363159", "be42b92f"]),
    ],
)
def test_the_random_bits_are_philoxs(seed: int, draw: int, words: list[str]) -> None:
    """The first line is the published vector of Philox-4x32-10 for key and counter 0."""
    found = random_words(np.array([seed]), np.array([draw]), 6)
    assert [f"{word:08x}" for word in found[0, :4].tolist()] == words


def test_the_noise_is_exponential() -> None:
    noise = exponential_noise(torch.tensor([1, 2]), torch.tensor([0, 5]), 50_000)
    assert noise.min() > 0
    for q in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = (noise < -math.log1p(-q)).double().mean().item()
        assert abs(share - q) < 5 * math.sqrt(q * (1 - q) / 100_000)
    assert abs(torch.corrcoef(noise)[0, 1]) < 0.03


def test_draws_follow_the_probabilities() -> None:
    rows = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(rows, 5).contiguous()
    tokens = sample_reference(logits, **columns(rows, temperature=0.7, top_k=4))
    probs = torch.softmax(torch.tensor([0.0, 1.0, 2.0, -math.inf, 0.5]) / 0.7, dim=0)
    share = torch.bincount(tokens, minlength=5) / rows
    assert ((share - probs).abs() < 5 * (probs * (1 - probs) / rows).sqrt() + 1e-9).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.zeros(2, 5).half()), "logits are torch.float16"),
        (dict(logits=torch.zeros(2, 0)), "float32 \\[N, vocab\\]"),
        (dict(top_k=torch.zeros(2, dtype=torch.int64)), "top_k is torch.int64"),
        (dict(seeds=torch.zeros(3, dtype=torch.int64)), "seeds is torch.int64 \\(3,\\)"),
        (dict(min_p=torch.zeros(2, device="meta")), "one device"),
    ],
)
def test_wrong_input_names_itself(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**{**dict(logits=torch.zeros(2, 5)), **columns(2), **change})
