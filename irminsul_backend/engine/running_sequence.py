"""The state of one request in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from irminsul_backend.cache import POLICIES, Admission
from irminsul_backend.engine.runner import Piece
from irminsul_backend.engine.sampler import Sampler
from irminsul_backend.protocol import Event, EventKind, GenerationRequest, Usage


class RunningSequence:
    """A request in the engine: waiting until it is admitted, then prefilling its holes, then decoding."""

    def __init__(
        self,
        request: GenerationRequest,
        token_ids: np.ndarray,
        chunk_ends: np.ndarray,
        fingerprints: np.ndarray,
        on_event: Callable[[Event], None],
        vocab_size: int,
    ) -> None:
        """token_ids int32 [n], n >= 1; chunk_ends int32 and fingerprints uint64 [chunks]."""
        self.request = request
        self.token_ids, self.chunk_ends, self.fingerprints = token_ids, chunk_ends, fingerprints
        self.policy = POLICIES[request.reuse]
        self.sampler = Sampler(request, token_ids, vocab_size)
        self.admission: Admission | None = None
        self.num_computed = 0
        """Number of holes whose rows are written."""
        self._on_event = on_event
        self._num_events = 0
        self._arrival = time.monotonic()
        self._admitted = self._first_token = 0.0

    @property
    def cached(self) -> Admission:
        """The admission of a request that is no longer waiting."""
        assert self.admission is not None, "the sequence is still waiting"
        return self.admission

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.cached.holes)

    def admit(self, admission: Admission) -> None:
        self.admission, self.num_computed = admission, 0
        self.token_ids = admission.sequence.token_ids[: len(self.token_ids)]  # the request's own copy can go
        if self._num_events == 0:
            self._admitted = time.monotonic()
            self.emit("admitted", request=self.request)

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
        self._on_event(Event(self.request.key, self._num_events, kind, **fields))
        self._num_events += 1

    def note_first_token(self) -> None:
        self._first_token = self._first_token or time.monotonic()

    def usage(self) -> Usage:
        n = len(self.token_ids)
        segments = self.admission.segments if self.admission else []
        exact = sum(s.end - s.start for s in segments if s.exact)
        shifted = sum(s.end - s.start for s in segments if not s.exact)
        return Usage(
            prompt_tokens=n,
            exact_tokens=exact,
            shifted_tokens=shifted,
            computed_tokens=n - exact - shifted,
            segments=len(segments),
            segment_map=[(s.start, s.end - s.start, s.delta) for s in segments],
            completion_tokens=len(self.sampler.generated),
            queue_ms=round(1000 * max(0.0, self._admitted - self._arrival), 3),
            ttft_ms=round(1000 * max(0.0, self._first_token - self._arrival), 3),
        )
