# mypy: allow-untyped-defs
"""Sampling of a token per row of logits: temperature, top-k, top-p, min-p, a random stream per row. No host round trip.

The kept set is that of a descending sort in which equal logits stand in order of their ids, but nothing is sorted: the
smallest kept logit is found by bisection over the logits that occur, counting and adding up what lies above a pivot,
10 to 20 passes over a row (none without top-k and top-p). Logits of a bf16 head are often equal; of those at the
threshold, as many are kept as there is room for, lowest ids first. A token is drawn as argmax(p / noise); the noise is
exponentially distributed and made by Philox from (seed, draws so far, id), so a request's tokens depend on its own seed
alone. `sampling_reference` draws the same without Triton.

Bytes moved: 4 * vocab per row from memory, the floor; the further passes read it from L2 (0.6 MB for 160,000 ids).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.device import next_power_of_two
from irminsul_kernels.device_math import use_kernel
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.ops.sampling_reference import sample_reference

BLOCK = 4096
WARPS = 16


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Sample one token per row; everything stays on the device.

    Args:
        logits: float32 [N, vocab], penalties and banned tokens (-inf) applied; contiguous. NaN counts as -inf.
        temperature: float32 [N]; 0 takes the largest logit, the lowest id among equals. Others from 1e-30 to 1e6: a
            logit over them must not leave what float32 holds.
        top_k: int32 [N]; 0 is off.
        top_p: float32 [N] in (0, 1]: a token is kept if those sorted before it have a total probability below this.
        min_p: float32 [N] in [0, 1]: a token is kept if its probability is at least this share of the largest one.
        seeds: int64 [N].
        draws: int64 [N], the number of tokens drawn with this seed so far, counted by the caller.
        out: int64 [N], written to; by default a new tensor.

    Returns:
        `out`, int64 [N]. A row without a finite logit gives 0.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit. Values are not checked: that would wait for the
            device.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape[1] == 0:
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; they must be contiguous "
            "float32 [N, vocab]"
        )
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    for name, column, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("draws", draws, torch.int64),
        ("out", out, torch.int64),
    ):
        if column.dtype != dtype or column.shape != (rows,) or not column.is_contiguous():
            raise ValueError(f"{name} is {column.dtype} {tuple(column.shape)}; it must be contiguous {dtype} ({rows},)")
        if column.device != logits.device:
            raise ValueError(f"{name} is on {column.device}, logits on {logits.device}; all must be on one device")
    if not use_kernel(logits):
        return out.copy_(sample_reference(logits, temperature, top_k, top_p, min_p, seeds, draws))
    if rows:
        sample_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, seeds, draws, out, vocab,
            BLOCK=min(BLOCK, max(128, next_power_of_two(vocab))), num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _logits(x, start, vocab, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < vocab, other=float("-inf"))
    v = tl.where(v == v, v, float("-inf"))
    # one zero, so that equal logits have equal keys
    return i, tl.where(v == 0, 0.0, v)


@triton.jit
def _key(v):
    """int32 in the order of the float32."""
    bits = v.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _share(v, top, heat):
    """Probability over that of the largest logit."""
    return tl.exp(tl.where(v == top, 0.0, (v - top) / heat))


# one number of each is read: a view at any offset must not mean another compilation
_COLUMNS = ["temperature", "top_k", "top_p", "min_p", "seeds", "draws", "out"]


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def sample_kernel(logits, temperature, top_k, top_p, min_p, seeds, draws, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * vocab
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        i, v = _logits(x, start, vocab, BLOCK)
        best_id = tl.where(v > best, i, best_id)
        best = tl.maximum(best, v)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_id, vocab - 1), axis=0)

    heat = tl.load(temperature + row)
    if (heat > 0) & (top > float("-inf")):
        k = tl.load(top_k + row)
        k = tl.where(k > 0, k, vocab)
        p = tl.load(top_p + row)
        least = tl.load(min_p + row)
        # from here on is kept, as far as min-p goes; -inf never is
        lowest = tl.where(least > 0, top + heat * tl.log(tl.maximum(least, 1e-38)), float("-inf"))
        lowest = tl.minimum(tl.maximum(lowest, -3.4028234663852886e38), top)
        floor = _key(tl.where(lowest == 0, 0.0, lowest)).to(tl.int64)
        threshold = floor
        quota = vocab
        if (k < vocab) | (p < 1):
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocab, BLOCK):
                _, v = _logits(x, start, vocab, BLOCK)
                mass += _share(v, top, heat)
            allowed = tl.where(p < 1, p * tl.sum(mass, axis=0), float("inf"))
            low = floor
            high = _key(top).to(tl.int64)
            # `high` occurs and is kept; `low` bounds the kept ones from below
            while low < high:
                pivot = low + ((high - low) >> 1)
                count, above_mass, below, above = _above(x, pivot, top, heat, vocab, BLOCK)
                kept = (count < k) & (above_mass < allowed)
                empty = below < low
                low = tl.where(kept, tl.where(empty, above, low), above)
                high = tl.where(kept, tl.where(empty, above, below), high)
            threshold = high
            count, above_mass, below, above = _above(x, threshold, top, heat, vocab, BLOCK)
            # of the logits at the threshold, as many as top-k and top-p leave room for
            bits = threshold.to(tl.int32)
            edge = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            room = tl.ceil((allowed - above_mass) / tl.maximum(_share(edge, top, heat), 1e-38))
            quota = tl.minimum(k - count, tl.minimum(tl.maximum(room, 1.0), 2147483520.0).to(tl.int32))
        token = _draw(x, seeds + row, draws + row, threshold, quota, top, heat, vocab, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _above(x, pivot, top, heat, vocab, BLOCK: tl.constexpr):
    """Number and mass of the logits over the pivot, largest key up to it, smallest key over it."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    below = tl.full([BLOCK], -2147483648, tl.int32)
    above = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        _, v = _logits(x, start, vocab, BLOCK)
        key = _key(v)
        over = key > pivot
        count += over.to(tl.int32)
        mass += tl.where(over, _share(v, top, heat), 0.0)
        above = tl.minimum(above, tl.where(over, key, 2147483647))
        below = tl.maximum(below, tl.where(over, -2147483648, key))
    return (
        tl.sum(count, axis=0),
        tl.sum(mass, axis=0),
        tl.max(below, axis=0).to(tl.int64),
        tl.min(above, axis=0).to(tl.int64),
    )


@triton.jit
def _draw(x, seed, draws, threshold, quota, top, heat, vocab, BLOCK: tl.constexpr):
    """argmax(p / noise) over the keys above the threshold and the first `quota` ids at it."""
    seed = tl.load(seed)
    drawn = tl.load(draws)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        i, v = _logits(x, start, vocab, BLOCK)
        key = _key(v)
        equal = (key == threshold).to(tl.int32)
        place = tl.cumsum(equal, axis=0)
        keep = (key > threshold) | ((equal != 0) & (place <= quota))
        quota -= tl.sum(equal, axis=0)
        word = tl.zeros([BLOCK // 4], tl.uint32)
        low = word + (drawn & 0xFFFFFFFF).to(tl.uint32)
        high = word + ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32)
        quad = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        r0, r1, r2, r3 = tl.philox(seed, quad, low, high, word)
        # id 4 * quad + n takes word n
        random = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCK])
        half = (random >> 1).to(tl.int32)
        uniform = (half.to(tl.float32) + 0.5) * 4.656612873077393e-10
        rest = ((0x7FFFFFFF - half).to(tl.float32) + 0.5) * 4.656612873077393e-10
        # -log(1 - u); where u is small, and a token likely to win, the logarithm of 1 - u would lose its digits
        series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
        noise = tl.where(uniform < 0.01, series, -tl.log(rest))
        score = tl.where(v == top, 0.0, (v - top) / heat) - tl.log(noise)
        score = tl.where(keep, score, float("-inf"))
        best_id = tl.where(score > best, i, best_id)
        best = tl.maximum(best, score)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_id, vocab - 1), axis=0)


def aot_configs(arch: int) -> list[KernelConfig]:
    """The same on every architecture; any vocabulary over 2,048."""
    signature: dict[str, Any] = dict(
        logits="*fp32", temperature="*fp32", top_k="*i32", top_p="*fp32", min_p="*fp32", seeds="*i64", draws="*i64",
        out="*i64", vocab="i32",
    )  # fmt: skip
    return [KernelConfig("sampling", sample_kernel, signature, dict(BLOCK=BLOCK), WARPS, 1, ("logits",))]
