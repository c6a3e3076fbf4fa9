"""Continuous batching over the position-independent cache, in one thread."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from irminsul_backend.cache import POLICIES, PICache
from irminsul_backend.chunking import PRESETS, Preset
from irminsul_backend.config import ServerConfig
from irminsul_backend.engine.placement import check_weights_fit, resolve_capacity, resolve_device
from irminsul_backend.engine.runner import ModelRunner
from irminsul_backend.engine.running_sequence import RunningSequence
from irminsul_backend.engine.sampler import sample, sample_on_device
from irminsul_backend.errors import CapacityError, InvalidRequestError, ServerStartError, UnavailableError
from irminsul_backend.model import MLAModel, load_model
from irminsul_backend.protocol import Event, FinishReason, GenerationRequest

log = logging.getLogger(__name__)

STEP_TARGET_S, LEAST_SLICE = 0.25, 128
"""Target duration of a step in seconds, and least token budget of a step. While sequences decode, the budget is halved
when a step took longer than the target and doubled when it took less than half of it, so that a long prompt does not
stall decoding. A smaller budget would repeat too much work per step."""
CHECK_EVERY_S = 10.0
"""Seconds between two integrity checks of an idle engine, at least: a check delays a new request by milliseconds."""


class Engine:
    """Serves requests with one model. :meth:`submit` may be called from any thread; events come from the engine's own.

    One step is one forward pass over the scheduled tokens: the next token of every decoding sequence and, within the
    token budget, prompt holes of the others, in order of arrival. A request is planned only when its prefill can
    begin, so it finds what the requests before it have just computed.
    """

    def __init__(
        self,
        model: MLAModel,
        capacity: int,
        preset: Preset,
        *,
        max_batch_tokens: int = 1024,
        max_running: int = 64,
        use_kernels: bool | None = None,
    ) -> None:
        """Make the engine without starting its thread.

        Args:
            capacity: number of slots in the pool.
            max_batch_tokens: token budget of a step.
            max_running: most sequences in a step.
            use_kernels: as in ModelRunner.
        """
        self.cache = PICache(capacity, preset)
        self.runner = ModelRunner(model, capacity, max_running=max_running, use_kernels=use_kernels)
        self._preset = preset
        self._max_batch_tokens = self._slice = max_batch_tokens
        self._max_running = max_running
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._live: dict[str, RunningSequence] = {}
        self._counters: Counter[str] = Counter()
        self._blocked = False  # the head of the queue did not fit; nothing has ended since
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._draining = False
        self._next_check = 0.0
        self._thread = threading.Thread(target=self._run, name="irminsul-engine", daemon=True)

    @classmethod
    def from_config(cls, config: ServerConfig) -> Engine:
        """Load the model and size the pool; raises ServerStartError or UnsupportedModelError with field and value."""
        if config.preset not in PRESETS:
            raise ServerStartError(f"preset is {config.preset!r}; it must be one of {', '.join(PRESETS)}")
        device, dtype = resolve_device(config)
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        check_weights_fit(config, device, dtype)
        model = load_model(config.model, device=device, dtype=dtype)
        engine = cls(
            model,
            resolve_capacity(config, model),
            PRESETS[config.preset],
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
        )
        engine.runner.warm_up()
        return engine

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End every request with an error and stop the thread."""

        def shut() -> None:
            self._closing = True
            for sequence in list(self._live.values()):
                self._fail(sequence, "the server is shutting down")

        self._inbox.put(shut)
        if self._thread.is_alive():
            self._thread.join()

    def drain(self, grace_s: float) -> bool:
        """Take no new requests, wait up to `grace_s` for the others and end those that remain; True if none does."""
        self._draining = True
        deadline = time.monotonic() + grace_s
        while self._live and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self._live:
            return True
        self.close()
        return False

    def submit(
        self,
        request: GenerationRequest,
        token_ids: np.ndarray,
        chunk_ends: np.ndarray,
        fingerprints: np.ndarray,
        on_event: Callable[[Event], None],
    ) -> None:
        """Queue a request; returns at once.

        Args:
            token_ids: int32 [n], n >= 1.
            chunk_ends: int32 [chunks], ascending, the last one n.
            fingerprints: uint64 [chunks].
            on_event: called on the engine's thread with every Event, in order of index; it must not block. The last
                event is of kind `finished` or `error`.

        Raises:
            InvalidRequestError: the tensors contradict each other, or the key is in use.
            UnavailableError: the engine drains.
        """
        if self._draining:
            raise UnavailableError("the server is shutting down and takes no new requests; send it to another one")
        n, vocab_size = len(token_ids), self.runner.model.config.vocab_size
        if n == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least one")
        if len(chunk_ends) != len(fingerprints) or chunk_ends[-1] != n or (np.diff(chunk_ends, prepend=0) <= 0).any():
            raise InvalidRequestError(
                f"{len(chunk_ends)} chunk ends and {len(fingerprints)} fingerprints do not describe {n} tokens"
            )
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise InvalidRequestError(
                f"token ids span {token_ids.min()}..{token_ids.max()}; they must be 0..{vocab_size - 1}"
            )
        sequence = RunningSequence(request, token_ids, chunk_ends, fingerprints, on_event, vocab_size)
        if self._live.setdefault(request.key, sequence) is not sequence:
            raise InvalidRequestError(
                f"request key {request.key!r} is in use by a running request; keys must be unique"
            )
        self._inbox.put(lambda: self._waiting.append(sequence))

    def stop(self, key: str, reason: FinishReason = "cancelled") -> bool:
        """End a request early; its `finished` event says why: `cancelled`, or `stop` where its text is complete.

        Returns False if no such request is waiting or running.
        """
        if key not in self._live:
            return False

        def cancel() -> None:
            sequence = self._live.get(key)
            if sequence is not None:
                self._finish(sequence, reason)

        self._inbox.put(cancel)
        return True

    def status(self) -> dict[str, Any]:
        """Return cache statistics, counters and the result of an integrity check, taken between two steps."""
        answer: Future[dict[str, Any]] = Future()
        self._inbox.put(lambda: answer.set_result(self._status()))
        return answer.result(timeout=60)

    def _status(self) -> dict[str, Any]:
        return {
            "cache": self.cache.stats(),
            "counters": dict(self._counters),
            "waiting": len(self._waiting),
            "running": len(self._running),
            "integrity": self._integrity() or "ok",
        }

    def _integrity(self) -> str:
        try:
            self.cache.check_integrity()
        except AssertionError as error:
            log.error("cache integrity: %s", error)
            return str(error)
        return ""

    def _run(self) -> None:
        self.runner.enter_thread()
        while not self._closing:
            try:
                self._take_inbox()
                if not self._closing and (self._waiting or self._running):
                    self._step()
            except Exception as error:
                log.exception("engine step failed; the cache starts afresh")
                self._start_afresh(f"internal error: {type(error).__name__}: {error}")

    def _take_inbox(self) -> None:
        idle = not self._waiting and not self._running
        if idle and self._inbox.empty() and time.monotonic() > self._next_check:
            if self._integrity():
                self._start_afresh("the cache contradicted itself")
            self._next_check = time.monotonic() + CHECK_EVERY_S
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
        except queue.Empty:
            pass

    def _start_afresh(self, message: str) -> None:
        """Fail every running request and empty the cache: after a fault no cached row is trusted."""
        self._counters["cache_resets"] += 1
        running, self._running = self._running, []
        self.cache = PICache(self.cache.pool.capacity, self._preset)
        self._blocked = False
        for sequence in running:
            if self._live.pop(sequence.request.key, None) is not None:
                self._counters["failed"] += 1
                sequence.emit("error", error=message)

    def _step(self) -> None:
        batch = self._schedule()
        if not batch:
            return
        decoding = sum(not s.is_prefilling for s in batch)
        budget = self._prefill_budget(decoding)
        began = time.monotonic()
        pieces = []
        for sequence in batch:
            pieces.append(sequence.next_piece(max(1, budget)))
            if sequence.is_prefilling:
                budget -= len(pieces[-1].positions)
        try:
            logits = self.runner.forward(pieces, self.cache.pool.base)
        except Exception as error:  # the batch is lost, the server is not
            log.exception("forward pass failed")
            for sequence in batch:
                self._fail(sequence, f"forward pass failed: {type(error).__name__}: {error}")
            return
        self._counters["steps"] += 1
        ready = []
        for sequence, piece in zip(batch, pieces, strict=True):
            prefilling = sequence.is_prefilling
            self._advance(sequence, len(piece.positions))
            if piece.wants_logits:
                ready.append(sequence)
            elif prefilling:
                sequence.emit("progress", prefilled=sequence.cached.sequence.length)
        if ready:
            self._sample(ready, logits)
        if decoding and len(batch) > decoding:  # tokens were sampled, so the device is synchronised
            self._adapt(time.monotonic() - began)

    def _schedule(self) -> list[RunningSequence]:
        """Select the sequences of a step: all that decode, then prefills in order of arrival within the budget."""
        batch = [s for s in self._running if not s.is_prefilling]
        budget = self._prefill_budget(len(batch))
        for sequence in self._running:
            if budget > 0 and sequence.is_prefilling:
                batch.append(sequence)
                budget -= len(sequence.cached.holes) - sequence.num_computed
        while budget > 0 and self._waiting and len(self._running) < self._max_running and not self._blocked:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                continue
            batch.append(sequence)
            budget -= len(sequence.cached.holes)
        return batch

    def _prefill_budget(self, decoding: int) -> int:
        """Return how many prompt tokens fit in a step with `decoding` decoding sequences."""
        return (self._slice if decoding else self._max_batch_tokens) - decoding

    def _adapt(self, seconds: float) -> None:
        if seconds > STEP_TARGET_S:
            self._slice = max(min(LEAST_SLICE, self._max_batch_tokens), self._slice // 2)
        elif seconds < STEP_TARGET_S / 2:
            self._slice = min(self._max_batch_tokens, self._slice * 2)

    def _admit(self, sequence: RunningSequence) -> bool:
        """Admit the head of the waiting queue; False if it failed or does not fit now."""
        request = sequence.request
        try:
            admission = self.cache.admit(
                sequence.token_ids,
                sequence.chunk_ends,
                sequence.fingerprints,
                namespace=request.namespace,
                session_id=request.session_id,
                policy=sequence.policy,
                max_new=request.sampling.max_tokens - 1,
            )
        except CapacityError as error:
            self._fail(sequence, str(error))
            return False
        if admission is None:
            self._blocked = True
            return False
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.admit(admission)
        return True

    def _advance(self, sequence: RunningSequence, tokens: int) -> None:
        cached, holes = sequence.cached.sequence, sequence.cached.holes
        if not sequence.is_prefilling:
            self.cache.advance(cached, cached.length + 1)
            return
        sequence.num_computed += tokens
        done = sequence.num_computed == len(holes)
        self.cache.advance(cached, len(sequence.token_ids) if done else int(holes[sequence.num_computed]))

    def _sample(self, ready: list[RunningSequence], logits: torch.Tensor) -> None:
        plain = [i for i, s in enumerate(ready) if s.sampler.is_plain] if self.runner.use_kernels else []
        if not plain:
            self._sample_by_torch(ready, logits)
            return
        others = [i for i, s in enumerate(ready) if not s.sampler.is_plain]
        if others:
            self._sample_by_torch([ready[i] for i in others], logits[others])
            ready, logits = [ready[i] for i in plain], logits[plain]
        tokens, finite = sample_on_device(logits, [s.sampler for s in ready])
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
        log_probs = any(s.request.return_log_probs for s in ready)
        try:
            tokens, scores = sample(logits, [s.sampler for s in ready], log_probs)
        except Exception as error:
            if len(ready) == 1:
                log.exception("sampling failed")
                self._fail(ready[0], f"sampling failed: {type(error).__name__}: {error}")
                return
            for i, sequence in enumerate(ready):  # sampled one by one, only the request at fault fails
                self._sample_by_torch([sequence], logits[i : i + 1])
            return
        for i, (sequence, token) in enumerate(zip(ready, tokens, strict=True)):
            self._accept(sequence, token, scores[i : i + 1] if sequence.request.return_log_probs else [])

    def _accept(self, sequence: RunningSequence, token: int, log_probs: list[float]) -> None:
        sequence.note_first_token()
        if token in sequence.request.end_ids:
            self._finish(sequence, "stop")
            return
        sequence.sampler.accept(token)
        if len(sequence.sampler.generated) >= sequence.request.sampling.max_tokens:
            self._finish(sequence, "length", token_ids=(token,), log_probs=log_probs)
        else:
            self.cache.append(sequence.cached.sequence, token)
            sequence.emit("tokens", token_ids=(token,), log_probs=log_probs)

    def _distrust(self, sequence: RunningSequence) -> None:
        """Handle non-finite logits: if rows were reused, discard their donors and recompute the whole prompt."""
        segments = sequence.cached.segments
        if not segments or sequence.sampler.generated:
            self._fail(
                sequence, "the model's logits are not finite (NaN or infinite); nothing was reused to blame for it"
            )
            return
        log.error("non-finite logits after reuse: recomputing %d tokens", len(sequence.token_ids))
        self._counters["distrusted"] += 1
        for donor in {s.donor for s in segments}:
            if not donor.running and self.cache.is_cached(donor):
                self.cache.discard(donor)
        self.cache.discard(sequence.cached.sequence)
        self._running.remove(sequence)
        self._blocked = False
        sequence.admission, sequence.policy = None, POLICIES["off"]
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: RunningSequence, reason: FinishReason, **last: Any) -> None:
        usage = sequence.usage()
        if sequence.admission is not None:
            self.cache.retire(sequence.admission.sequence)
            for source in ("exact", "shifted", "computed"):
                self._counters[f"{source}_tokens"] += getattr(usage, f"{source}_tokens")
        self._counters["generated_tokens"] += usage.completion_tokens
        self._counters[f"finished_{reason}"] += 1
        self._leave(sequence)
        sequence.emit("finished", finish_reason=reason, usage=usage, **last)

    def _fail(self, sequence: RunningSequence, message: str) -> None:
        if sequence.admission is not None:
            self.cache.discard(sequence.admission.sequence)
        self._counters["failed"] += 1
        self._leave(sequence)
        sequence.emit("error", error=message)

    def _leave(self, sequence: RunningSequence) -> None:
        del self._live[sequence.request.key]
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._blocked = False
