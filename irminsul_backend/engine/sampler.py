"""Sampling: temperature, top-k, top-p and min-p, with one random stream per request."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch
from irminsul_kernels.attention.mla_attention import KERNEL_ARCHITECTURES
from irminsul_kernels.ops.sampling_reference import sample_reference
from torch import Tensor

from irminsul_backend.engine.adjustment import Adjustment, adjust
from irminsul_backend.engine.batch import pinned
from irminsul_backend.protocol import GenerationRequest

LEAST_TEMPERATURE = 1e-30
"""Lower ones but 0 count as this, at which any two logits of a size over 1e-21 are infinitely far apart already."""

LEAST_TOP_P = float(np.finfo(np.float32).tiny)


class Sampler:
    """Sampling state of one request.

    What it draws follows from the logits, the seed (all 64 bits) and the number of tokens in the answer before, on
    nothing else: neither the rest of the batch nor the device, nor whether tokens before were drawn or replayed by
    :meth:`accept`, nor anything asked for that leaves the distribution as it is.
    """

    def __init__(self, request: GenerationRequest, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """prompt_ids: int32 [n], not kept; only the repetition penalty counts them."""
        self.params = request.sampling
        self.generated: list[int] = []
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed
        self.adjustment = Adjustment(request, prompt_ids, vocab_size)
        self.is_plain = not request.return_log_probs
        """Whether :func:`sample_on_device` serves the request. Fixed; :func:`sample` draws the same tokens."""

    def accept(self, token: int) -> None:
        """Record a generated token, for penalties, bad words and the next draw."""
        self.generated.append(token)
        self.adjustment.accept(token)


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[Sampler], log_probs: bool) -> tuple[list[int], list[float]]:
    """Sample one token per row of logits.

    Args:
        logits: float32 [N, vocab], contiguous; changed in place.
        samplers: N of them.
        log_probs: also return the log-probability of each token under the model (temperature 1, no penalties).

    Returns:
        N token ids and N log-probabilities (empty if not asked for).
    """
    raw = torch.log_softmax(logits, dim=-1) if log_probs else None
    adjust(logits, [s.adjustment for s in samplers])
    if logits.is_cuda and torch.cuda.get_device_capability(logits.device) in KERNEL_ARCHITECTURES:
        tokens = _draw_by_kernel(logits, samplers)
    else:
        tokens = logits.argmax(dim=-1)
        random = [i for i, s in enumerate(samplers) if s.params.temperature > 0]
        if random:
            columns = _columns([samplers[i] for i in random], logits.device)
            tokens[random] = sample_reference(logits[random], *columns)
    chosen = raw.gather(1, tokens[:, None])[:, 0].tolist() if raw is not None else []
    return tokens.tolist(), chosen


@torch.inference_mode()
def sample_on_device(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[bool]]:
    """Sample one token per row with the sampling kernel, for plain samplers; synchronises once, for the result.

    Args:
        logits: float32 [N, vocab], contiguous; changed in place.
        samplers: N of them, each with `is_plain`.

    Returns:
        N token ids, and whether the row's logits are all finite (if not, the token means nothing).
    """
    finite = torch.isfinite(logits).all(dim=1)
    adjust(logits, [s.adjustment for s in samplers])
    chosen, is_finite = torch.stack((_draw_by_kernel(logits, samplers), finite.long())).tolist()
    return chosen, [bool(f) for f in is_finite]


def _draw_by_kernel(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    from irminsul_kernels.ops.sampling import sample as sample_kernel

    return sample_kernel(logits, *_columns(samplers, logits.device))


def _columns(samplers: Sequence[Sampler], device: torch.device) -> tuple[Tensor, ...]:
    """Temperature, top-k, top-p, min-p, seed and draws so far, [N] each, as the sampling kernel takes them."""
    params = [s.params for s in samplers]
    # the same 64 bits as a signed number
    seeds = [(s.seed + 2**63) % 2**64 - 2**63 for s in samplers]
    whole = [seeds, [len(s.generated) for s in samplers], [p.top_k for p in params]]
    heat = [max(p.temperature, LEAST_TEMPERATURE) if p.temperature > 0 else 0.0 for p in params]
    # a top-p that float32 rounds to 0 still keeps the likeliest token
    real = [heat, [max(p.top_p, LEAST_TOP_P) for p in params], [p.min_p for p in params]]
    seed, draws, top_k = pinned(np.array(whole, np.int64), device).to(device, non_blocking=True)
    temperature, top_p, min_p = pinned(np.array(real, np.float32), device).to(device, non_blocking=True)
    return temperature, top_k.int(), top_p, min_p, seed, draws
