"""The ensemble's second step: requests go to the engine, its events to Triton."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from irminsul_backend.logs import about
from irminsul_backend.protocol import Event, FinishReason, GenerationRequest
from irminsul_backend.triton_io.engine_interface import EngineInterface, MetricsInterface
from irminsul_backend.triton_io.events import Outgoing, hold_back, merge, pack_event
from irminsul_backend.triton_io.sealing import seal, unseal
from irminsul_backend.triton_io.steps import finish, refuse, respond, send
from irminsul_backend.triton_io.tensors import CONTROL_INPUT, EVENT_TENSORS, PLAN_TENSORS, read_fields

LAST_WORDS_SECONDS = 5.0
"""How long an engine that failed has for telling its clients."""

logger = logging.getLogger(__name__)


class EngineModel:
    """Hands requests to the engine and its events to Triton. `execute` never waits; another thread sends."""

    def __init__(self, engine: EngineInterface, metrics: MetricsInterface, interval_s: float) -> None:
        """Start the sending thread.

        Args:
            metrics: told of every event before that is sent.
            interval_s: least time between two responses with tokens of one request.
        """
        self._engine = engine
        self._metrics = metrics
        self._interval_s = interval_s
        self._failed = threading.Event()
        self._outbox: queue.SimpleQueue[tuple[Outgoing, Event] | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name="irminsul-sender", daemon=True)
        self._sender.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:
                finish(sender, refuse(error))

    def is_ready(self) -> bool:
        """Asked by servers from 26.04 on; older ones take every loaded model for ready."""
        return not self._failed.is_set()

    def finalize(self) -> None:
        self._engine.close()
        self._close_outbox(timeout_s=2)
        self._metrics.close()

    def on_fatal(self, reason: str) -> None:
        """The engine has failed for good and has said so to its clients: send that, then end this process.

        Returns at once. The server is told to end too. Without its engine it would go on saying that it is ready.
        """
        self._failed.set()
        threading.Thread(target=self._end, args=(reason,), name="irminsul-end", daemon=True).start()

    def _end(self, reason: str) -> None:
        self._close_outbox(LAST_WORDS_SECONDS)
        print(f"error: the engine has failed and the server ends: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getppid(), signal.SIGTERM)
        os._exit(1)

    def _close_outbox(self, timeout_s: float) -> None:
        self._outbox.put(None)
        self._wake.set()
        self._sender.join(timeout_s)

    def _submit(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        fields = read_fields(request, (*PLAN_TENSORS, CONTROL_INPUT))
        if CONTROL_INPUT.name in fields:
            self._control(json.loads(unseal((CONTROL_INPUT,), fields)[CONTROL_INPUT.name]), sender)
            return
        plan = unseal(PLAN_TENSORS, fields)
        self._engine.submit(
            GenerationRequest.unpack(plan["request"]),
            plan["token_ids"],
            plan["chunk_ends"],
            plan["fingerprints"],
            partial(self._on_event, Outgoing(sender)),
        )

    def _control(self, command: dict[str, Any], sender: pb_utils.InferenceResponseSender) -> None:
        if "stop" in command:
            reason: FinishReason = "stop" if command.get("reason") == "stop" else "cancelled"
            self._engine.stop(command["stop"], reason)
            finish(sender, None)
        else:
            # The engine answers between two steps, which may take seconds; new requests must not wait for it.
            threading.Thread(target=self._send_status, args=(sender,), name="irminsul-status", daemon=True).start()

    def _send_status(self, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            status = {"output_ids": (), "output_log_probs": (), "event": json.dumps(self._engine.status())}
            response = respond(EVENT_TENSORS, status)
        except Exception as error:
            response = refuse(error)
        finish(sender, response)

    def _on_event(self, outgoing: Outgoing, event: Event) -> None:
        """On the engine's thread, which a woken sender would keep waiting for the interpreter: wake it only if due."""
        self._outbox.put((outgoing, event))
        if event.kind != "tokens" or time.monotonic() >= outgoing.due:
            self._wake.set()

    def _send_all(self) -> None:
        held: list[tuple[Outgoing, Event]] = []
        closing, latest_due = False, 0.0
        while not closing or held:
            wait = latest_due - time.monotonic()  # whatever comes after that is due, and wakes
            self._wake.wait(timeout=wait if wait > 0 else None)
            self._wake.clear()
            batch = self._drain()
            closing = closing or None in batch
            now = float("inf") if closing else time.monotonic()
            due, held = hold_back(merge([*held, *(item for item in batch if item is not None)]), now)
            for outgoing, event in due:
                if not outgoing.ended:
                    self._send(outgoing, event)
                latest_due = max(latest_due, outgoing.due)

    def _drain(self) -> list[tuple[Outgoing, Event] | None]:
        batch: list[tuple[Outgoing, Event] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._outbox.get_nowait())
        return batch

    def _send(self, outgoing: Outgoing, event: Event) -> None:
        """Send an event. If that fails the request ends, here, in the engine and for its client."""
        outgoing.ended = event.kind in ("finished", "error")
        self._count(event)
        event = replace(event, index=outgoing.sent)
        outgoing.sent += 1
        if event.kind == "tokens":
            outgoing.due = time.monotonic() + self._interval_s
        values = {"output_ids": event.token_ids, "output_log_probs": event.log_probs, "event": pack_event(event)}
        try:
            send(outgoing.sender, respond(EVENT_TENSORS, seal(EVENT_TENSORS, values)), final=outgoing.ended)
        except Exception as error:
            with about(event.key):
                logger.exception("an event was not sent")
            outgoing.ended = True
            self._engine.stop(event.key)
            with contextlib.suppress(Exception):  # after a FINAL that failed nothing more can be sent
                outgoing.sender.send(refuse(error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _count(self, event: Event) -> None:
        try:
            self._metrics.count(event)
        except Exception:
            logger.exception("an event was not counted")  # the client must still get it
