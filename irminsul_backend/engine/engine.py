"""Continuous batching over the position-independent cache: the engine as other threads see it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from irminsul_backend.cache import PICache
from irminsul_backend.chunking import PRESETS, Preset
from irminsul_backend.config import ServerConfig
from irminsul_backend.engine.admission_control import AdmissionControl
from irminsul_backend.engine.core import EngineCore
from irminsul_backend.engine.faults import describe
from irminsul_backend.engine.placement import check_weights_fit, resolve_capacity, resolve_device
from irminsul_backend.engine.request_checks import check_prompt, check_request
from irminsul_backend.engine.runner import ModelRunner
from irminsul_backend.engine.running_sequence import Prompt, RunningSequence
from irminsul_backend.engine.token_budget import TokenBudget
from irminsul_backend.errors import CapacityError, InvalidRequestError, ServerStartError
from irminsul_backend.model import MLAModel, load_model
from irminsul_backend.protocol import EngineSnapshot, Event, FinishReason, GenerationRequest

log = logging.getLogger(__name__)

STEP_TARGET_S = {"cuda": 0.05, "cpu": 0.25}
"""Default target duration of a step in which sequences decode beside prompts, in seconds, by device."""


class Engine:
    """Serves requests with one model. Its methods may be called from any thread; events come from the engine's own.

    One step is one forward pass over the scheduled tokens; :class:`Scheduler` says which. What goes wrong with one
    request ends that one alone. If steps keep failing, or the device is lost, the engine fails for good: every request
    gets an error, :attr:`failure` says why, and `on_fatal` is called once.
    """

    def __init__(
        self,
        model: MLAModel,
        capacity: int,
        preset: Preset,
        *,
        max_batch_tokens: int = 1024,
        max_running: int = 64,
        max_waiting: int = 4096,
        max_waiting_per_namespace: int = 2048,
        step_target_s: float | None = None,
        use_kernels: bool | None = None,
        on_fatal: Callable[[str], None] | None = None,
    ) -> None:
        """Make the engine without starting its thread.

        Args:
            capacity: number of slots in the pool.
            max_batch_tokens: token budget of a step.
            max_running: most sequences in a step.
            max_waiting: most requests that have not begun; more are refused.
            max_waiting_per_namespace: most of them in one namespace.
            step_target_s: as the setting `step_target_ms`, in seconds; by default as the device has it.
            use_kernels: as in ModelRunner.
            on_fatal: called on the engine's thread with the reason, as its last act, when the engine has failed.
        """
        self.runner = ModelRunner(model, capacity, max_running=max_running, use_kernels=use_kernels)
        self._door = AdmissionControl(max_waiting, max_waiting_per_namespace)
        target = step_target_s or STEP_TARGET_S.get(model.device.type, STEP_TARGET_S["cpu"])
        budget = TokenBudget(max_batch_tokens, target)
        self._core = EngineCore(self.runner, capacity, preset, self._door, budget, max_running)
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._snapshot = self._core.snapshot()
        self._thread = threading.Thread(target=self._run, name="irminsul-engine", daemon=True)

    @classmethod
    def from_config(cls, config: ServerConfig, on_fatal: Callable[[str], None] | None = None) -> Engine:
        """Load the model and size the pool. Raises ServerStartError or UnsupportedModelError with field and value."""
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
            max_waiting=config.max_waiting,
            max_waiting_per_namespace=config.max_waiting_per_namespace,
            step_target_s=config.step_target_ms / 1000 or None,
            on_fatal=on_fatal,
        )
        engine.runner.warm_up()
        return engine

    @property
    def cache(self) -> PICache:
        """The cache, which belongs to the engine's thread; :meth:`snapshot` has its numbers."""
        return self._core.cache

    @property
    def failure(self) -> str:
        """Why the engine has failed; empty if it has not."""
        return self._door.reason

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def close(self) -> None:
        """End every request with an error, and the engine's thread. Further requests are refused."""
        self._door.shut("closed")
        if self._thread.ident is None:
            self._end("")
            return
        self._inbox.put(lambda: None)  # wakes it
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def drain(self, grace_s: float) -> bool:
        """Refuse further requests, let the others finish for up to `grace_s` seconds, then close the engine.

        Returns whether all of them finished; those that did not got an error.
        """
        self._door.shut("draining")
        finished = self._door.wait_until_empty(grace_s)
        self.close()
        return finished and not self.failure

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
            on_event: called on the engine's thread with every Event, in order of index; it must not block. The last one
                is of kind `finished` or `error`.

        Raises:
            InvalidRequestError: a field or an array is wrong, or the key is in use.
            CapacityError: prompt and answer can never fit the pool.
            OverloadedError: too many requests are waiting.
            UnavailableError: the engine is closed, closing or has failed.
        """
        try:
            check_request(request, vocab_size := self.runner.model.config.vocab_size)
            check_prompt(token_ids, chunk_ends, fingerprints, vocab_size)
            self._core.cache.check_fits(len(token_ids), request.sampling.max_tokens - 1)
        except (InvalidRequestError, CapacityError):
            self._door.reject("invalid")
            raise
        sequence = RunningSequence(request, Prompt(token_ids, chunk_ends, fingerprints), on_event, vocab_size)
        self._door.accept(request, lambda: self._inbox.put(lambda: self._core.add(sequence)))

    def stop(self, key: str, reason: FinishReason = "cancelled") -> bool:
        """End a request early; its `finished` event says why: `cancelled`, or `stop` where its text is complete.

        False if no such request is waiting or running.
        """
        return self._door.if_live(key, lambda: self._inbox.put(lambda: self._core.cancel(key, reason)))

    def forget_namespace(self, namespace: str) -> None:
        """Let no later request find the rows of a namespace. Raises UnavailableError if the engine has ended."""
        self._door.if_open(lambda: self._inbox.put(lambda: self._core.cache.forget_namespace(namespace)))

    def snapshot(self) -> EngineSnapshot:
        """Return the state after the last step, at once."""
        return self._snapshot

    def status(self) -> dict[str, Any]:
        """Return cache statistics, counters and the verdict of an integrity check, taken between two steps.

        Raises UnavailableError if the engine has ended.
        """
        answer: Future[dict[str, Any]] = Future()

        def reply() -> None:
            try:
                answer.set_result(self._core.status())
            except Exception as error:
                answer.set_exception(error)

        self._door.if_open(lambda: self._inbox.put(reply))
        return answer.result(timeout=60)

    def _run(self) -> None:
        reason = ""
        try:
            self.runner.enter_thread()
            while self._door.state in ("running", "draining") and not self._core.faults.fatal:
                self._take_inbox()
                if not self._core.is_idle:
                    self._core.step()
                self._snapshot = self._core.snapshot()
            reason = self._core.faults.fatal
        except BaseException as error:
            self._core.faults.log("the engine's loop", error)
            reason = describe(error)
        self._end(reason)

    def _end(self, reason: str) -> None:
        """End every request, those included that were handed over just now; a reason means that the engine failed."""
        self._door.shut("failed" if reason else "closed", reason)
        while not self._inbox.empty():
            self._core.run(self._inbox.get())
        self._core.end_all(f"the engine has failed: {reason}" if reason else "the server is shutting down")
        self._snapshot = self._core.snapshot()
        if reason:
            log.critical("the engine has failed and serves no more requests: %s", reason)
            if self._on_fatal is not None:
                self._on_fatal(reason)

    def _take_inbox(self) -> None:
        """Do what other threads asked for; if there is nothing else to do, wait for it."""
        idle = self._core.is_idle
        if idle:
            self._core.check_while(self._inbox.empty)
        try:
            while True:
                self._core.run(self._inbox.get(block=idle))
                idle = False
        except queue.Empty:
            pass
