"""The work of the engine's thread, step by step: requests come in, tokens go out, a fault stays with its request."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from irminsul_backend.cache import PICache
from irminsul_backend.chunking import Preset
from irminsul_backend.engine.admission_control import AdmissionControl
from irminsul_backend.engine.batch import Piece
from irminsul_backend.engine.faults import Faults
from irminsul_backend.engine.runner import ModelRunner
from irminsul_backend.engine.running_sequence import RunningSequence
from irminsul_backend.engine.sampler import sample, sample_on_device
from irminsul_backend.engine.scheduler import Scheduler
from irminsul_backend.engine.token_budget import TokenBudget
from irminsul_backend.logs import about
from irminsul_backend.protocol import EngineSnapshot, EventKind, FinishReason

log = logging.getLogger(__name__)

CHECK_EVERY_S = 10.0
"""Seconds from one integrity check of the cache by an idle engine to the next."""
CHECK_EVERY_STEPS = 100
"""A busy engine does a part of the check, about a millisecond, after so many steps."""
COUNTERS = (
    "steps", "exact_tokens", "shifted_tokens", "computed_tokens", "generated_tokens", "finished_stop",
    "finished_length", "finished_cancelled", "failed", "timeouts", "undeliverable", "preemptions", "distrusted",
    "cache_resets", "faults", "rejected_invalid", "rejected_queue_full", "rejected_namespace_full",
    "rejected_key_in_use", "rejected_unavailable",
)  # fmt: skip
"""Counters that a snapshot always has; the others are in it from their first event on."""


class EngineCore:
    """Serves requests. An exception that one request causes, wherever that is, ends this request alone: :meth:`step`
    and :meth:`run` raise none. If it may have left the cache contradictory, the cache starts afresh, and the other
    running requests are computed again."""

    def __init__(
        self,
        runner: ModelRunner,
        capacity: int,
        preset: Preset,
        door: AdmissionControl,
        budget: TokenBudget,
        max_running: int,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(PICache(capacity, preset), preset, budget, max_running)
        self.faults = Faults(runner.check_device)
        self.next_check = 0.0
        self._preset = preset
        self._door = door
        self._live: dict[str, RunningSequence] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap, with entries of requests that have ended
        self._counters: Counter[str] = self.scheduler.counters
        self._progress = False  # this step computed something for a request

    @property
    def cache(self) -> PICache:
        return self.scheduler.cache

    @property
    def is_idle(self) -> bool:
        return not self._live

    def add(self, sequence: RunningSequence) -> None:
        self._live[sequence.request.key] = sequence
        self.scheduler.add(sequence)
        if sequence.deadline is not None:
            if len(self._deadlines) > 1000 + 2 * len(self._live):
                self._deadlines = [(s.deadline, key) for key, s in self._live.items() if s.deadline is not None]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.request.key))

    def cancel(self, key: str, reason: FinishReason) -> None:
        sequence = self._live.get(key)
        if sequence is not None:
            self.scheduler.current = sequence
            self._finish(sequence, reason)

    def end_all(self, message: str) -> None:
        """End every request with an error."""
        for sequence in list(self._live.values()):
            self.run(lambda sequence=sequence: self._fail(sequence, message))  # type: ignore[misc]

    def run(self, call: Callable[[], None]) -> None:
        """Do what another thread asks for."""
        self.scheduler.current = None
        try:
            call()
        except Exception as error:
            self._recover("a request of another thread", error)

    def step(self) -> None:
        """One forward pass, and everything around it."""
        faults, self._progress, self.scheduler.current = self.faults.count, False, None
        try:
            self._expire(time.monotonic())
            self._compute()
        except Exception as error:
            self._recover("an engine step", error)
        self.faults.step_ended(self._progress, self.faults.count > faults)
        if self._counters["steps"] % CHECK_EVERY_STEPS == 0:
            self._check_part()

    def check_while(self, is_idle: Callable[[], bool]) -> None:
        """Check the cache part by part while the engine is idle, if the last time is long enough ago."""
        ended = time.monotonic() < self.next_check
        while not ended and is_idle():
            ended = self._check_part()
            if ended:
                self.next_check = time.monotonic() + CHECK_EVERY_S

    def _check_part(self) -> bool:
        """Check a part of the cache; returns whether a pass over everything has ended. What is wrong starts afresh."""
        try:
            return self.cache.check_some()
        except AssertionError as error:
            self.faults.record("the cache's integrity check", error)
            self._start_afresh()
            return True

    def status(self) -> dict[str, Any]:
        return {
            "state": self._door.state,
            "cache": self.cache.stats(),
            "counters": self._all_counters(),
            "waiting": self.scheduler.num_waiting,
            "running": len(self.scheduler.running),
            "integrity": self._integrity(),
        }

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            state=self._door.state,
            waiting=self.scheduler.num_waiting,
            running=len(self.scheduler.running),
            cache=self.cache.stats(),
            counters=dict.fromkeys(COUNTERS, 0) | self._all_counters(),
            taken=time.monotonic(),
        )

    def _all_counters(self) -> dict[str, int]:
        counters = self._counters | self._door.rejections()
        return counters | {"faults": self.faults.count} if self.faults.count else counters

    def _integrity(self) -> str:
        try:
            self.cache.check_integrity()
        except AssertionError as error:
            self.faults.log("the cache's integrity check", error)
            return str(error)
        return "ok"

    def _recover(self, what: str, error: Exception) -> None:
        """End the request on whose behalf an exception was raised, or all running ones, and distrust the cache."""
        culprit = self.scheduler.current
        failed = list(self.scheduler.running) if culprit is None else [culprit]
        message = f"internal error: {self._record(what, error, *failed)}"
        self._start_afresh()
        for sequence in failed:
            self._fail(sequence, message)

    def _record(self, what: str, error: Exception, *sequences: RunningSequence) -> str:
        """Count a fault and log it with the requests that it concerns; returns its description."""
        session_id = sequences[0].request.session_id if len(sequences) == 1 else ""
        with about(*(s.request.key for s in sequences), session_id=session_id):
            return self.faults.record(what, error)

    def _start_afresh(self) -> None:
        """Give up every cached row; running requests wait, to be computed again."""
        self._counters["cache_resets"] += 1
        self.scheduler.cache = PICache(self.cache.pool.capacity, self._preset)
        for sequence in sorted(self.scheduler.running, key=lambda s: s.arrival, reverse=True):
            self.scheduler.requeue(sequence)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            sequence = self._live.get(key)
            if sequence is not None and sequence.deadline == deadline:
                self._counters["timeouts"] += 1
                tokens = len(sequence.sampler.generated)
                limit = sequence.request.timeout_ms
                message = f"the deadline of {limit} ms (timeout_ms) passed after {tokens} tokens of the answer"
                self._end(sequence, "error", error=message)

    def _compute(self) -> None:
        batch = self.scheduler.schedule()
        self.scheduler.current = None
        batch = [(sequence, piece) for sequence, piece in batch if self._announce(sequence)]
        if not batch:
            return
        decoding = sum(not sequence.is_prefilling for sequence, _ in batch)
        began = time.monotonic()
        computed, logits = self._forward(batch)
        self._counters["steps"] += 1
        ready = []
        for sequence, piece in computed:
            self.scheduler.current = sequence
            if self._advance(sequence, piece):
                ready.append(sequence)
        self.scheduler.current = None
        if ready:
            self._sample(ready, logits)
        if decoding and len(batch) > decoding:  # the sampling has waited for the device, so this is the step's duration
            self.scheduler.budget.adapt(time.monotonic() - began)

    def _announce(self, sequence: RunningSequence) -> bool:
        """Send the first event of a request that has just begun; False if it has ended thereby."""
        if sequence.is_announced:
            return True
        sequence.is_announced = True
        self._door.started(sequence.request)
        return self._emit(sequence, "admitted", request=sequence.request)

    def _forward(
        self, batch: list[tuple[RunningSequence, Piece]]
    ) -> tuple[list[tuple[RunningSequence, Piece]], torch.Tensor]:
        """Return what was computed of the batch, and the logits of the pieces among it that want them, one row each.

        If the forward pass of the batch fails, each piece is computed alone, so only the request at fault fails.
        """
        try:
            return batch, self.runner.forward([piece for _, piece in batch], self.cache.pool.base)
        except Exception as error:
            description = self._record("a forward pass", error, *(sequence for sequence, _ in batch))
            if len(batch) == 1 or self.faults.fatal:
                for sequence, _ in batch:
                    self._fail(sequence, f"forward pass failed: {description}")
                return [], torch.empty(0)
        computed, rows = [], []
        for sequence, piece in batch:
            try:
                logits = self.runner.forward([piece], self.cache.pool.base)
                rows.append(logits.clone())
            except Exception as error:
                self._fail(sequence, f"forward pass failed: {self._record('a forward pass', error, sequence)}")
            else:
                computed.append((sequence, piece))
        return computed, torch.cat(rows) if rows else torch.empty(0)

    def _advance(self, sequence: RunningSequence, piece: Piece) -> bool:
        """Record the rows of a piece as written; returns whether a token can be sampled."""
        cached, holes = sequence.cached.sequence, sequence.cached.holes
        if not sequence.is_prefilling:
            self.cache.advance(cached, cached.length + 1)
            return True
        sequence.num_computed += len(piece.positions)
        done = not sequence.is_prefilling
        self.cache.advance(cached, cached.prompt_length if done else int(holes[sequence.num_computed]))
        if not done:
            self._progress = True
            self._emit(sequence, "progress", prefilled=min(cached.length, len(sequence.prompt.token_ids)))
        return done

    def _sample(self, ready: list[RunningSequence], logits: torch.Tensor) -> None:
        plain = [i for i, s in enumerate(ready) if s.sampler.is_plain] if self.runner.use_kernels else []
        others = sorted(set(range(len(ready))).difference(plain))
        if others:
            self._sample_by_torch([ready[i] for i in others], logits[others] if plain else logits)
        if not plain:
            return
        ready, logits = [ready[i] for i in plain], logits[plain] if others else logits
        original = logits.clone()  # sampling changes them
        try:
            tokens, finite = sample_on_device(logits, [s.sampler for s in ready])
        except Exception as error:
            self.faults.record("sampling", error)
            self._sample_by_torch(ready, original)
            return
        for sequence, token, is_finite in zip(ready, tokens, finite, strict=True):
            if is_finite:
                self._accept(sequence, token, [])
            else:
                self._distrust(sequence)

    def _sample_by_torch(self, ready: list[RunningSequence], logits: torch.Tensor) -> None:
        finite = torch.isfinite(logits).all(dim=1).tolist()
        if not all(finite):
            for sequence in [s for s, ok in zip(ready, finite, strict=True) if not ok]:
                self._distrust(sequence)
            ready = [s for s, ok in zip(ready, finite, strict=True) if ok]
            logits = logits[torch.tensor(finite)]
            if not ready:
                return
        original = logits.clone()  # sampling changes them
        try:
            tokens, scores = sample(logits, [s.sampler for s in ready], any(s.request.return_log_probs for s in ready))
        except Exception as error:
            description = self._record("sampling", error, *ready)
            if len(ready) == 1:
                self._fail(ready[0], f"sampling failed: {description}")
                return
            for i, sequence in enumerate(ready):  # sampled one by one, only the request at fault fails
                self._sample_by_torch([sequence], original[i : i + 1])
            return
        for i, (sequence, token) in enumerate(zip(ready, tokens, strict=True)):
            self._accept(sequence, token, scores[i : i + 1] if sequence.request.return_log_probs else [])

    def _accept(self, sequence: RunningSequence, token: int, log_probs: list[float]) -> None:
        if sequence.admission is None:
            return  # preempted by one before it in the batch: the token will be sampled again, the same one
        self._progress, self.scheduler.current = True, sequence
        sequence.note_token()
        if token in sequence.request.end_ids:
            self._finish(sequence, "stop")
            return
        sequence.sampler.accept(token)
        self.scheduler.charge(sequence, 1)
        if len(sequence.sampler.generated) >= sequence.request.sampling.max_tokens:
            self._finish(sequence, "length", token_ids=(token,), log_probs=log_probs)
        elif self._emit(sequence, "tokens", token_ids=(token,), log_probs=log_probs) and self.scheduler.grow(sequence):
            self.cache.append(sequence.cached.sequence, token)

    def _distrust(self, sequence: RunningSequence) -> None:
        """Handle non-finite logits: if rows were reused, discard their donors and recompute the whole prompt."""
        if sequence.admission is None:
            return
        self.scheduler.current = sequence
        segments = sequence.cached.segments
        if not segments or len(sequence.sampler.generated) > sequence.num_resumed:
            self._fail(
                sequence, "the model's logits are not finite (NaN or infinite); nothing was reused to blame for it"
            )
            return
        with about(sequence.request.key, session_id=sequence.request.session_id):
            log.error("non-finite logits after reuse: recomputing %d tokens", sequence.cached.sequence.prompt_length)
        self._progress = True
        self._counters["distrusted"] += 1
        for donor in {s.donor for s in segments}:
            if not donor.running and self.cache.is_cached(donor):
                self.cache.discard(donor)
        self.cache.discard(sequence.cached.sequence)
        sequence.distrust_reuse()
        self.scheduler.requeue(sequence)

    def _emit(self, sequence: RunningSequence, kind: EventKind, **fields: Any) -> bool:
        """Send an event that is not the last; if its receiver raises, end the request and return False."""
        try:
            sequence.emit(kind, **fields)
            return True
        except Exception as error:
            self._counters["undeliverable"] += 1
            self._end(
                sequence, "error", error=f"an event was not delivered: {self._record('an event', error, sequence)}"
            )
            return False

    def _finish(self, sequence: RunningSequence, reason: FinishReason, **last: Any) -> None:
        usage = sequence.usage()
        if sequence.has_begun:
            for source in ("exact", "shifted", "computed"):
                self._counters[f"{source}_tokens"] += getattr(usage, f"{source}_tokens")
        self._counters["generated_tokens"] += usage.completion_tokens
        self._counters[f"finished_{reason}"] += 1
        self._end(sequence, "finished", finish_reason=reason, usage=usage, **last)

    def _fail(self, sequence: RunningSequence, message: str) -> None:
        """End a request whose rows are not to be trusted."""
        self._counters["failed"] += 1
        self._end(sequence, "error", keep=False, error=message)

    def _end(self, sequence: RunningSequence, kind: EventKind, *, keep: bool = True, **last: Any) -> None:
        """Take a request out and send its last event; its written rows become a donor or are discarded."""
        key = sequence.request.key
        if self._live.get(key) is not sequence:
            return
        self.scheduler.current = sequence
        if sequence.admission is not None:
            (self.cache.retire if keep else self.cache.discard)(sequence.admission.sequence)
        self.scheduler.remove(sequence)
        sequence.admission = None
        del self._live[key]
        if not sequence.is_announced:
            self._door.started(sequence.request)
        self._door.ended(key)
        try:
            sequence.emit(kind, **last)
        except Exception as error:
            self._counters["undeliverable"] += 1
            with about(key):
                self.faults.log("the last event", error)
