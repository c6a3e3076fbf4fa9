"""The three steps of the ensemble as they run inside the Python backend's stub processes."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from irminsul_backend.errors import InvalidRequestError, IrminsulError
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.protocol import Event, FinishReason, GenerationRequest
from irminsul_backend.triton_io.engine_interface import EngineInterface
from irminsul_backend.triton_io.events import Outgoing, hold_back, merge, pack_event, unpack_event
from irminsul_backend.triton_io.tensors import (
    CONTROL_INPUT,
    EVENT_TENSORS,
    PLAN_TENSORS,
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    TensorSpec,
    read_fields,
    to_array,
)

if TYPE_CHECKING:
    from irminsul_backend.frontend.chunker import PromptPreparer

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

logger = logging.getLogger(__name__)


def respond(specs: Iterable[TensorSpec], values: dict[str, Any]) -> pb_utils.InferenceResponse:
    """Make the response whose outputs are `values` by name, one for each of `specs`."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(s.name, to_array(s, values[s.name])) for s in specs])


def refuse(error: Exception) -> pb_utils.InferenceResponse:
    """Make the response that fails one request. An error that is not an IrminsulError is a defect: it is logged too."""
    if isinstance(error, IrminsulError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}"
        logger.error("request failed: %s", message, exc_info=error)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


class ChunkerModel:
    """Turns a request into token ids, chunk ends, fingerprints and a GenerationRequest. Holds the sessions."""

    def __init__(self, preparer: PromptPreparer) -> None:
        self._preparer = preparer

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._one(request) for request in requests]

    def finalize(self) -> None:
        """Nothing to give back."""

    def _one(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        session_id, flags = str(request.correlation_id()), request.flags()
        start, end = bool(flags & START), bool(flags & END)
        try:
            try:
                fields = read_fields(request, REQUEST_INPUTS)
            except InvalidRequestError:
                self._preparer.sessions.enter(session_id, start, end)  # its flags count, as those of any bad request
                raise
            prepared = self._preparer.prepare(fields, session_id, start, end)
        except Exception as error:
            return refuse(error)
        values = {
            "token_ids": prepared.token_ids,
            "chunk_ends": prepared.chunk_ends,
            "fingerprints": prepared.fingerprints,
            "request": prepared.request.pack(),
        }
        return respond(PLAN_TENSORS, values)


class EngineModel:
    """Hands requests to the engine and its events to Triton. `execute` never waits; another thread sends."""

    def __init__(self, engine: EngineInterface, on_finished: Callable[[Event], None], interval_s: float) -> None:
        """Start the sending thread.

        Args:
            on_finished: called with every `finished` or `error` event, before that is sent.
            interval_s: least time between two responses with tokens of one request.
        """
        self._engine = engine
        self._interval_s = interval_s
        self._on_finished = on_finished
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
                sender.send(refuse(error), flags=FINAL)

    def finalize(self) -> None:
        self._engine.close()
        self._outbox.put(None)
        self._wake.set()
        self._sender.join(timeout=2)

    def _submit(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        fields = read_fields(request, (*PLAN_TENSORS, CONTROL_INPUT))
        if "control" in fields:
            self._control(fields["control"], sender)
            return
        missing = [spec.name for spec in PLAN_TENSORS if spec.name not in fields]
        if missing:
            raise InvalidRequestError(f"{', '.join(missing)} missing; requests belong to the model 'irminsul'")
        outgoing = Outgoing(sender)
        self._engine.submit(
            GenerationRequest.unpack(fields["request"]),
            fields["token_ids"],
            fields["chunk_ends"],
            fields["fingerprints"],
            partial(self._on_event, outgoing),
        )

    def _control(self, data: bytes, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            command = json.loads(data)
        except ValueError:
            command = None
        if not isinstance(command, dict):
            command = {}
        if "stop" in command:
            reason: FinishReason = "stop" if command.get("reason") == "stop" else "cancelled"
            sender.send(_answer({"stopped": self._engine.stop(str(command["stop"]), reason)}), flags=FINAL)
        elif command.get("status"):
            # The engine answers between two steps, which may take seconds; new requests must not wait for it.
            threading.Thread(target=self._send_status, args=(sender,), name="irminsul-status", daemon=True).start()
        else:
            raise InvalidRequestError(
                f'control is {data.decode(errors="replace")}; it must be {{"stop": key}} or {{"status": true}}'
            )

    def _send_status(self, sender: pb_utils.InferenceResponseSender) -> None:
        try:
            response = _answer(self._engine.status())
        except Exception as error:
            response = refuse(error)
        sender.send(response, flags=FINAL)

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
            send, held = hold_back(merge([*held, *(item for item in batch if item is not None)]), now)
            for outgoing, event in send:
                try:
                    self._send(outgoing, event)
                except Exception:
                    logger.exception("an event was not sent")
                latest_due = max(latest_due, outgoing.due)

    def _drain(self) -> list[tuple[Outgoing, Event] | None]:
        batch: list[tuple[Outgoing, Event] | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._outbox.get_nowait())
        return batch

    def _send(self, outgoing: Outgoing, event: Event) -> None:
        final = event.kind in ("finished", "error")
        if final:
            try:
                self._on_finished(event)
            except Exception:
                logger.exception("an ended request was not counted")  # its client must still get the last response
        event = replace(event, index=outgoing.sent)
        outgoing.sent += 1
        if event.kind == "tokens":
            outgoing.due = time.monotonic() + self._interval_s
        values = {"output_ids": event.token_ids, "output_log_probs": event.log_probs, "event": pack_event(event)}
        outgoing.sender.send(respond(EVENT_TENSORS, values), flags=FINAL if final else 0)


def _answer(answer: dict[str, Any]) -> pb_utils.InferenceResponse:
    return respond(EVENT_TENSORS, {"output_ids": (), "output_log_probs": (), "event": json.dumps(answer)})


class DetokenizerModel:
    """Turns events into text. It sees cancelled clients and completed stop words first, and tells the engine."""

    def __init__(self, table: TranscriptTable) -> None:
        self._table = table
        self._stopper = Stopper()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                response = self._one(request, sender)
            except Exception as error:
                response = refuse(error)
            if response is None:
                sender.send(flags=FINAL)
            else:
                sender.send(response, flags=FINAL)

    def finalize(self) -> None:
        self._stopper.close()

    def _one(
        self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender
    ) -> pb_utils.InferenceResponse | None:
        fields = read_fields(request, EVENT_TENSORS)
        event = unpack_event(fields["event"], fields["output_ids"], fields["output_log_probs"])
        try:
            reply, why = self._table.feed(event, sender.is_cancelled)
        except Exception:
            self._stopper.stop(event.key)
            raise
        if why:
            self._stopper.stop(event.key, why)
        return None if reply is None else respond(RESPONSE_OUTPUTS, vars(reply))


class Stopper:
    """Tells the engine to stop requests, on a separate thread because a model may not wait inside `execute`."""

    def __init__(self) -> None:
        self._keys: queue.SimpleQueue[tuple[str, FinishReason] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="irminsul-stopper", daemon=True)
        self._thread.start()

    def stop(self, key: str, why: FinishReason = "cancelled") -> None:
        """Ask the engine to stop request `key`, which may have ended meanwhile. Returns at once."""
        self._keys.put((key, why))

    def close(self) -> None:
        """End the thread, after what it has been asked so far or 2 seconds, whichever comes first."""
        self._keys.put(None)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while (item := self._keys.get()) is not None:
            try:
                for response in control({"stop": item[0], "reason": item[1]}):
                    if error := response.error():
                        logger.error("stop was refused: %s", error.message())
            except Exception:
                logger.exception("stop was not sent")


def control(command: dict[str, Any]) -> Iterator[pb_utils.InferenceResponse]:
    """Send a control request to the engine by BLS and yield its responses."""
    request = pb_utils.InferenceRequest(
        model_name="irminsul_engine",
        requested_output_names=["event"],
        inputs=[pb_utils.Tensor(CONTROL_INPUT.name, to_array(CONTROL_INPUT, json.dumps(command)))],
    )
    yield from request.exec(decoupled=True)
