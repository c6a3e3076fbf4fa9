"""The state of one request in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from irminsul_backend.cache import POLICIES, Admission
from irminsul_backend.chunking import Preset, cut, fingerprint
from irminsul_backend.engine.batch import Piece
from irminsul_backend.engine.sampler import Sampler
from irminsul_backend.protocol import Event, EventKind, GenerationRequest, Usage


class Prompt(NamedTuple):
    """What is admitted to the cache."""

    token_ids: np.ndarray
    """int32 [n]"""
    chunk_ends: np.ndarray
    """int32 [chunks]"""
    fingerprints: np.ndarray
    """uint64 [chunks]"""


class RunningSequence:
    """A request in the engine: waiting until it is admitted, then prefilling its holes, then decoding.

    It may be preempted: then it waits again, and its prompt and answer so far are admitted as one prompt.
    """

    def __init__(
        self, request: GenerationRequest, prompt: Prompt, on_event: Callable[[Event], None], vocab_size: int
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.policy = POLICIES[request.reuse]
        self.sampler = Sampler(request, prompt.token_ids, vocab_size)
        self.admission: Admission | None = None
        self.num_computed = 0
        """Number of holes whose rows are written."""
        self.num_resumed = 0
        """Length of the answer when it was admitted last."""
        self.is_announced = False
        """Whether its `admitted` event was sent."""
        self.is_waiting = False
        """Whether the scheduler's queue holds it."""
        self.preemptions = 0
        self.last_step = 0
        """Number of the step that computed a token of its answer last."""
        self.arrival = time.monotonic()
        self.deadline = self.arrival + request.timeout_ms / 1000 if request.timeout_ms else None
        self.flow = request.namespace, request.session_id
        self.priority = request.priority
        self._on_event = on_event
        self._num_events = 0
        self._reused: list[tuple[int, int, int, bool]] = []  # (start, length, delta, exact) of the first admission
        self._admitted = self._first_token = self._last_token = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """The order in which requests are served when there is not room for all: the least first."""
        return -self.priority, self.arrival

    @property
    def has_begun(self) -> bool:
        return self._admitted > 0

    @property
    def cached(self) -> Admission:
        """The admission of a request that is no longer waiting."""
        assert self.admission is not None, "the sequence is still waiting"
        return self.admission

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.cached.holes)

    @property
    def max_new(self) -> int:
        """Rows still to be written for the answer; that of the last token is never needed."""
        return self.request.sampling.max_tokens - len(self.sampler.generated) - 1

    def prompt_to_admit(self, preset: Preset) -> Prompt:
        """Return the prompt, extended by the answer so far."""
        if not self.sampler.generated:
            return self.prompt
        n = len(self.prompt.token_ids)
        ids = np.concatenate((self.prompt.token_ids, np.array(self.sampler.generated, np.int32)))
        ends = n + cut(ids[n:], preset)
        start = max(0, n - preset.gram) if preset.gram else n  # a gram may begin in the prompt
        prints = fingerprint(ids[start:], ends - start, self.request.namespace, preset.gram)
        return Prompt(
            ids,
            np.concatenate((self.prompt.chunk_ends, ends)).astype(np.int32),
            np.concatenate((self.prompt.fingerprints, prints)),
        )

    def admit(self, admission: Admission) -> None:
        self.admission, self.num_computed, self.num_resumed = admission, 0, len(self.sampler.generated)
        n = len(self.prompt.token_ids)
        self.prompt = self.prompt._replace(token_ids=admission.sequence.token_ids[:n])  # the request's copy can go
        if not self.has_begun:
            self._reused = [(s.start, s.end - s.start, s.delta, s.exact) for s in admission.segments]
        self._admitted = self._admitted or time.monotonic()

    def distrust_reuse(self) -> None:
        """Compute the whole prompt from now on."""
        self.policy, self._reused = POLICIES["off"], []

    def next_piece(self, budget: int) -> Piece:
        """Return the tokens to schedule next: up to `budget` (>= 1) holes, or the last generated token."""
        sequence, holes = self.cached.sequence, self.cached.holes
        if self.is_prefilling:
            positions = holes[self.num_computed : self.num_computed + budget]
            wants_logits = self.num_computed + len(positions) == len(holes)
        else:
            positions = np.array([sequence.length])
            wants_logits = True
        return Piece(sequence.token_ids[positions], positions, sequence.slots, wants_logits)

    def emit(self, kind: EventKind, **fields: Any) -> None:
        """Send an event. Raises whatever its receiver raises."""
        event = Event(self.request.key, self._num_events, kind, **fields)
        self._num_events += 1
        self._on_event(event)

    def note_token(self) -> None:
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token

    def usage(self) -> Usage:
        n, generated = len(self.prompt.token_ids), len(self.sampler.generated)
        exact = sum(length for _, length, _, is_exact in self._reused if is_exact)
        shifted = sum(length for _, length, _, is_exact in self._reused if not is_exact)
        decoding = self._last_token - self._first_token
        return Usage(
            prompt_tokens=n,
            exact_tokens=exact,
            shifted_tokens=shifted,
            computed_tokens=n - exact - shifted,
            segments=len(self._reused),
            segment_map=[run[:3] for run in self._reused],
            completion_tokens=generated,
            queue_ms=_ms(self._admitted - self.arrival),
            ttft_ms=_ms(self._first_token - self.arrival),
            prefill_ms=_ms(self._first_token - self._admitted),
            inter_token_ms=_ms(decoding / (generated - 1)) if generated > 1 else 0.0,
            preemptions=self.preemptions,
        )


def _ms(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
