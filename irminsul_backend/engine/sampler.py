"""Sampling: penalties, bad words, temperature, top-k, top-p and min-p, with one random stream per request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from irminsul_backend.engine.batch import pinned
from irminsul_backend.protocol import GenerationRequest


class Sampler:
    """Sampling state of one request. Its random numbers depend only on its seed and on how many it has drawn."""

    def __init__(self, request: GenerationRequest, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """prompt_ids: int32 [n], not kept; only the repetition penalty counts them."""
        self.params = request.sampling
        self.bad_words = [list(word) for word in request.bad_words if word]
        self.generated: list[int] = []
        self._generator: torch.Generator | None = None
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        if self.params.temperature > 0:
            self._generator = torch.Generator().manual_seed(self.seed)
        p = self.params
        self._penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        if self._penalised:
            seen = np.zeros(vocab_size, np.bool_)
            seen[prompt_ids] = True
            self._seen = torch.from_numpy(seen)
            self._counts = torch.zeros(vocab_size)
        self.is_plain = not (self._penalised or self.bad_words or request.return_log_probs)
        """Whether :func:`sample_on_device` serves the request. Fixed, because its random stream is a different one."""

    @torch.inference_mode()
    def adjust(self, logits: Tensor) -> None:
        """Apply penalties and bad words to one row of logits, float32 [vocab], in place."""
        if self._penalised:
            p = self.params
            seen = self._seen.to(logits.device)
            counts = self._counts.to(logits.device)
            repeated = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
            logits.copy_(torch.where(seen, repeated, logits))
            logits.sub_(counts * p.frequency_penalty + (counts > 0) * p.presence_penalty)
        for word in self.bad_words:
            if len(word) == 1 or self.generated[-len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = float("-inf")

    def noise(self, vocab_size: int) -> Tensor:
        """Draw exponential noise, float32 [vocab]: argmax(p / noise) is a sample of p."""
        return torch.empty(vocab_size).exponential_(generator=self._generator)

    def accept(self, token: int) -> None:
        """Record a generated token, for penalties and bad words."""
        self.generated.append(token)
        if self._penalised:
            self._seen[token] = True
            self._counts[token] += 1


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[Sampler], log_probs: bool) -> tuple[list[int], list[float]]:
    """Sample one token per row of logits.

    Args:
        logits: float32 [N, vocab]; changed in place.
        samplers: N of them.
        log_probs: also return the log-probability of each token under the model (temperature 1, no penalties).

    Returns:
        N token ids and N log-probabilities (empty if not asked for).
    """
    raw = torch.log_softmax(logits, dim=-1) if log_probs else None
    for row, sampler in zip(logits, samplers, strict=True):
        sampler.adjust(row)
    tokens = logits.argmax(dim=-1)
    random = [i for i, s in enumerate(samplers) if s.params.temperature > 0]
    if random:
        tokens[random] = _draw(logits[random], [samplers[i] for i in random])
    chosen = raw.gather(1, tokens[:, None])[:, 0].tolist() if raw is not None else []
    return tokens.tolist(), chosen


def _draw(logits: Tensor, samplers: list[Sampler]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab_size = logits.shape[1]
    probs = torch.softmax(logits / column([s.params.temperature for s in samplers]), dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(vocab_size, device=logits.device)
    before = ordered.cumsum(dim=-1) - ordered
    keep = rank < column([s.params.top_k or vocab_size for s in samplers])
    keep &= before < column([s.params.top_p for s in samplers])
    keep &= ordered >= ordered[:, :1] * column([s.params.min_p for s in samplers])
    noise = torch.stack([s.noise(vocab_size) for s in samplers]).to(logits.device)
    best = (ordered * keep / noise).argmax(dim=-1, keepdim=True)
    return order.gather(1, best)[:, 0]


@torch.inference_mode()
def sample_on_device(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[bool]]:
    """Sample one token per row with the sampling kernel, for plain samplers; synchronises once, for the result.

    Args:
        logits: float32 [N, vocab], contiguous.
        samplers: N of them, each with `is_plain`.

    Returns:
        N token ids, and whether the row's logits are all finite (if not, the token means nothing).
    """
    from irminsul_kernels.ops.sampling import sample as sample_kernel

    params = [s.params for s in samplers]
    # seeds beyond int64 wrap: torch's generator takes both signs as well
    seeds = [(s.seed + 2**63) % 2**64 - 2**63 for s in samplers]
    whole = [seeds, [len(s.generated) for s in samplers], [p.top_k for p in params]]
    real = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
    seed, draws, top_k = pinned(np.array(whole, np.int64), logits.device).to(logits.device, non_blocking=True)
    temperature, top_p, min_p = pinned(np.array(real, np.float32), logits.device).to(logits.device, non_blocking=True)
    tokens = sample_kernel(logits, temperature, top_k.int(), top_p, min_p, seed, draws)
    finite = torch.isfinite(logits).all(dim=1)
    chosen, is_finite = torch.stack((tokens, finite.long())).tolist()
    return chosen, [bool(f) for f in is_finite]
