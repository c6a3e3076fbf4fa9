"""One engine by kernels, one by torch, for test_gpu_path.py: on a GPU, or interpreted (all but graph capture)."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import torch

from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.engine import Engine
from irminsul_backend.engine.batch import Piece
from irminsul_backend.engine.runner import ModelRunner
from irminsul_backend.model import MLAModel, attention
from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.request_spec import SamplingParams

CAPACITY, VOCAB = 300, 512


def steps(model: MLAModel) -> dict[str, list[float]]:
    """Relative L2 distance of the logits of kernels and torch, step by step, on the same rows where they are reused.

    Rows nobody wrote are NaN. The second sequence is the first one's rows moved by 17, with holes at both ends and in
    the middle; the third shares slots with it.
    """
    rng = np.random.default_rng(5)
    ids = rng.integers(2, VOCAB, 110).astype(np.int32)
    # the first and the last slot are in use: padding must not write there
    order = np.r_[0, CAPACITY - 1, 1 + rng.permutation(CAPACITY - 2)].astype(np.int32)
    base = np.zeros(CAPACITY, np.int32)
    taken = 0

    def fresh(positions: np.ndarray) -> np.ndarray:
        nonlocal taken
        slots = order[taken : taken + len(positions)]
        taken += len(positions)
        base[slots] = positions
        return slots

    first = fresh(np.arange(70))
    second = np.zeros(110, np.int32)
    second[17:87] = first
    holes = np.concatenate((np.arange(17), np.arange(40, 46), np.arange(87, 100)))
    second[holes] = fresh(holes)
    second[100:] = fresh(np.arange(100, 110))
    third = np.concatenate((second[:50], fresh(np.arange(50, 60))))
    short = fresh(np.arange(5))

    def piece(slots: np.ndarray, positions: Any, wants_logits: bool = True) -> Piece:
        positions = np.atleast_1d(positions)
        return Piece(ids[positions], positions, slots, wants_logits)

    plan = {
        "prefill": [piece(first, np.arange(69), False), piece(short, np.arange(3))],
        "decode": [piece(first, 69), piece(short, 3)],
        "holes beside decode": [piece(second, holes), piece(short, 4), piece(third, np.arange(50, 53), False)],
        "decode in a padded bucket": [piece(second, 100), piece(third, 53), piece(first, 69)],
        "decode alone": [piece(second, 101)],
        "hole of one token that wants no logits": [piece(third, 54, False), piece(second, 102)],
    }
    runners = [ModelRunner(model, CAPACITY, max_running=4, use_kernels=use) for use in (True, False)]
    for runner in runners:
        runner.rows.fill_(float("nan"))
    distances = {}
    for name, pieces in plan.items():
        ours, theirs = (forward(runner, pieces, base) for runner in runners)
        assert ours.shape == theirs.shape == (sum(p.wants_logits for p in pieces), VOCAB)
        distances[name] = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    ours, theirs = (runner.rows[:, order[:taken]] for runner in runners)
    written = ~theirs.isnan().any(dim=2)
    assert torch.equal(written, ~ours.isnan().any(dim=2)), "another row was written, or one was not"
    distances["rows"] = [((ours - theirs)[written].norm() / theirs[written].norm()).item()]
    return distances


def forward(runner: ModelRunner, pieces: list[Piece], base: np.ndarray) -> torch.Tensor:
    """A pass whose new rows are made by the kernel too, where attention is by kernels."""
    with mock.patch.object(attention, "has_row_kernel", lambda x: runner.use_kernels):
        return runner.forward(pieces, base)


def answers(model: MLAModel, use_kernels: bool) -> dict[str, Any]:
    """A first prompt alone; then at once: the same text moved, the same again, and two sampled ones."""
    preset = PRESETS["default"]
    engine = Engine(model, 2000, preset, max_batch_tokens=100, max_running=3, use_kernels=use_kernels)
    engine.runner.rows.fill_(float("nan"))
    engine.start()
    rng = np.random.default_rng(6)
    text = rng.integers(2, VOCAB, 110).astype(np.int32)

    def submit(key: str, ids: np.ndarray, **sampling: Any) -> tuple[list[Event], threading.Event]:
        events: list[Event] = []
        done = threading.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            if event.kind in ("finished", "error"):
                done.set()

        ends = cut(ids, preset, None)
        request = GenerationRequest(
            key=key, session_id=key, namespace="n", sampling=SamplingParams(max_tokens=3, **sampling)
        )
        engine.submit(request, ids, ends, fingerprint(ids, ends, "n", preset.gram), on_event)
        return events, done

    def result(events: list[Event], done: threading.Event) -> dict[str, Any]:
        assert done.wait(120), "a request did not end"
        assert not events[-1].error, events[-1].error
        usage = events[-1].usage
        assert usage is not None
        return {"tokens": [t for e in events for t in e.token_ids], "shifted": usage.shifted_tokens}

    found = {"first": result(*submit("first", text))}
    moved = np.concatenate((rng.integers(2, VOCAB, 41).astype(np.int32), text[10:], text[:9]))
    pending = {
        "moved": submit("moved", moved),
        "same": submit("same", text),
        "sampled": submit("sampled", text[:40], temperature=0.8, seed=2**64 - 3, top_k=20, top_p=0.9, min_p=0.01),
        "sampled again": submit(
            "sampled again", text[:40], temperature=0.8, seed=2**64 - 3, top_k=20, top_p=0.9, min_p=0.01
        ),
        "cold": submit("cold", text[:40], temperature=1e-3, seed=5),
        "penalised": submit("penalised", text[:40], frequency_penalty=0.5),
    }
    found |= {key: result(*one) for key, one in pending.items()}
    status = engine.status()
    engine.close()
    assert status["integrity"] == "ok", status
    return found
