"""What a step's sampling costs by itself: penalties and bad words, for many sequences at once.

    python -m irminsul_backend.benchmarks.sampling [--device cuda] [--sequences N] [--vocab N]

Every case is timed in turn, round after round, and the least time counts: another load on the machine falls on all.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from irminsul_backend.engine.sampler import Sampler, sample
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import MAX_WORDS, SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS, ROUNDS = 1024, 200, 15
PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({}, 0),
    "temperature": (dict(temperature=0.8), 0),
    "top-k 40, top-p 0.9": (dict(temperature=0.8, top_k=40, top_p=0.9), 0),
    "greedy, penalties": (PENALTIES, 0),
    f"greedy, {MAX_WORDS} bad words": ({}, MAX_WORDS),
    f"greedy, penalties, {MAX_WORDS} bad words": (PENALTIES, MAX_WORDS),
}


def samplers_of(case: str, sequences: int, vocab: int) -> list[Sampler]:
    """In the middle of their answers; bad words have one to four tokens."""
    rng = np.random.default_rng(0)
    params, words = CASES[case]
    found = []
    for seed in range(sequences):
        bad_words = [rng.integers(0, vocab, 1 + i % 4).tolist() for i in range(words)]
        request = GenerationRequest(key="", sampling=SamplingParams(seed=seed, **params), bad_words=bad_words)
        one = Sampler(request, rng.integers(0, vocab, PROMPT_TOKENS).astype(np.int32), vocab)
        for token in rng.integers(0, vocab, ANSWER_TOKENS).tolist():
            one.accept(token)
        found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the sampling of one step, on the CPU or on a GPU.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    cases = {case: samplers_of(case, args.sequences, args.vocab) for case in CASES}
    logits = 3 * torch.randn(args.sequences, args.vocab, generator=torch.Generator().manual_seed(0)).to(args.device)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        for case, samplers in cases.items():
            step = logits.clone()
            began = time.perf_counter()
            tokens, _ = sample(step, samplers, False)
            for one, token in zip(samplers, tokens, strict=True):
                one.accept(token)
            times[case].append(time.perf_counter() - began)
    print(f"{args.sequences} sequences, {args.vocab} ids, {args.device}: milliseconds a step, least of {ROUNDS}")
    for case, seconds in times.items():
        print(f"{case:40} {1000 * min(seconds):8.2f}")


if __name__ == "__main__":
    main()
