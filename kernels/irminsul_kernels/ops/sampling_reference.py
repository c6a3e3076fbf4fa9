"""Sampling by torch, in float64 and with a sort: what the kernel is checked against, and what samples without a GPU.

The random numbers are Philox's, a counter-based generator: bits are a function of key and counter, there is no state.
The key is the seed, the counter holds the number of the draw and the token's id. So the same seed draws the same token
here, in the kernel, in any batch, and when a draw is repeated.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SORTED_FIRST = 1024
"""Tokens that are sorted at first; the whole vocabulary is where top-k or top-p keep more than these."""


def random_words(seeds: np.ndarray, draws: np.ndarray, vocab: int) -> np.ndarray:
    """32 random bits for each id, uint64 [N, vocab], from int64 seeds [N] and int64 draws [N].

    Philox-4x32 with 10 rounds: the key is the seed's 64 bits, the counter (id // 4, draw's lower and upper half, 0);
    of its four words, id takes number id % 4.
    """
    # numpy: a third of what torch takes for as many small operations on int64
    word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    seeds, draws = (np.ascontiguousarray(a).view(np.uint64)[:, None] for a in (seeds, draws))
    c0 = np.arange(-(-vocab // 4), dtype=np.uint64)[None]
    c1, c2, c3 = draws & word, draws >> half, np.zeros_like(draws)
    k0, k1 = seeds & word, seeds >> half
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ (c1 ^ k0), b & word, (a >> half) ^ (c3 ^ k1), a & word
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & word, (k1 + np.uint64(0xBB67AE85)) & word
    return np.stack((c0, c1, c2, c3), axis=-1).reshape(len(seeds), -1)[:, :vocab]


def exponential_noise(seeds: Tensor, draws: Tensor, vocab: int) -> Tensor:
    """Exponentially distributed, float64 [N, vocab], from int64 seeds [N] and int64 draws [N]; made on the CPU."""
    words = random_words(seeds.cpu().numpy(), draws.cpu().numpy(), vocab)
    uniform = torch.from_numpy(((words >> np.uint64(1)) + 0.5) * 2**-31)
    return uniform.neg_().log1p_().neg_().to(seeds.device)


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, draws: Tensor
) -> Tensor:
    """The same as :func:`irminsul_kernels.ops.sampling.sample`, whose arguments and result are described there."""
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    top, greedy = logits.max(dim=-1, keepdim=True)
    vocab = logits.shape[1]
    heat = torch.where(temperature > 0, temperature, 1).double()[:, None]
    # 0 at the largest logit, also where that is -inf
    distance = torch.where(logits == top, 0, logits.double() - top.double()) / heat
    share = distance.exp()
    keep = share >= min_p.double()[:, None]
    limited = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
    if limited.any():
        keep[limited] &= _within(logits[limited], share[limited], top_k[limited], top_p[limited])
    drawn = (share * keep / exponential_noise(seeds, draws, vocab)).argmax(dim=-1)
    return torch.where((temperature > 0) & (top[:, 0] > -torch.inf), drawn, greedy[:, 0])


def _within(logits: Tensor, share: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which tokens top-k and top-p leave, bool [N, vocab]; `share` is the probability over that of the likeliest."""
    vocab = logits.shape[1]
    most = torch.where(top_k > 0, top_k, vocab)[:, None]
    mass = torch.where(top_p < 1, top_p.double() * share.sum(dim=-1), torch.inf)[:, None]
    largest = min(vocab, SORTED_FIRST)
    while True:
        ordered, ids = logits.topk(largest, dim=-1)
        before = F.pad(share.gather(1, ids).cumsum(dim=-1)[:, :-1], (1, 0))
        kept = (torch.arange(largest, device=logits.device) < most) & (before < mass)
        if largest == vocab or not kept[:, -1].any():
            break
        largest = vocab
    count = kept.sum(dim=-1, keepdim=True)
    edge = ordered.gather(1, count - 1)
    at_edge = logits == edge
    room = count - (logits > edge).sum(dim=-1, keepdim=True)
    return (logits > edge) | (at_edge & (at_edge.cumsum(dim=-1) <= room))
