"""The three steps of the ensemble as they run inside the Python backend's stub processes."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from irminsul_backend.errors import InvalidRequestError, IrminsulError, UnavailableError
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.frontend.work_queue import WorkQueue
from irminsul_backend.logs import about
from irminsul_backend.protocol import Event, FinishReason
from irminsul_backend.triton_io.events import unpack_event
from irminsul_backend.triton_io.sealing import seal, unseal
from irminsul_backend.triton_io.tensors import (
    CONTROL_INPUT,
    EVENT_TENSORS,
    PLAN_TENSORS,
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    SESSION_INPUTS,
    TensorSpec,
    read_fields,
    to_array,
)

if TYPE_CHECKING:
    from irminsul_backend.frontend.chunker import Prepared, PromptPreparer
    from irminsul_backend.frontend.sessions import SessionId
    from irminsul_backend.triton_io.engine_interface import RejectionMetrics

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
LARGE_BYTES = 1 << 20

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


def send(
    sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse | None, final: bool = True
) -> None:
    """Send a response, or None to end a request without one.

    The server releases the interpreter lock while it sends, and drops the outputs that its client did not ask for.
    Releases before 24.12 then free these arrays without the lock; here they are held until all is sent.

    A send with FINAL counts as the last even if it fails. What is so large that the shared memory might not take it
    goes without FINAL, so that the request can still be ended with an error.
    """
    tensors = [] if response is None else response.output_tensors()
    if final and sum(map(_size, (t.as_numpy() for t in tensors))) > LARGE_BYTES:
        sender.send(response)
        response = None
    sender.send(response, flags=FINAL if final else 0)
    del tensors


def finish(sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse | None) -> bool:
    """Send a request's last response. False if that failed: it is logged, and the client told if that is possible."""
    try:
        send(sender, response)
        return True
    except Exception as error:
        logger.exception("a request's last response was not sent")
        with contextlib.suppress(Exception):  # after a FINAL that failed nothing more can be sent
            sender.send(refuse(error), flags=FINAL)
        return False


class _Preparation(NamedTuple):
    """One request at the chunker."""

    sender: pb_utils.InferenceResponseSender
    fields: dict[str, Any] | InvalidRequestError
    """The inputs, or why they cannot be read."""
    session: SessionId | None
    start: bool | None
    end: bool


class ChunkerModel:
    """Turns a request into token ids, chunk ends, fingerprints and a GenerationRequest. Holds the sessions.

    `execute` only queues: a long text would keep all other requests waiting while it is tokenised. Requests of one
    session are prepared and sent in order. One thread makes and sends every response.
    """

    def __init__(
        self, preparer: PromptPreparer, max_waiting_bytes: int = 1 << 26, metrics: RejectionMetrics | None = None
    ) -> None:
        self._preparer = preparer
        self._metrics = metrics
        self._queue = WorkQueue(self._prepare, max_waiting_bytes)
        self._outbox: queue.SimpleQueue[tuple[pb_utils.InferenceResponseSender, Prepared | Exception] | None] = (
            queue.SimpleQueue()
        )
        self._sender = threading.Thread(target=self._send_all, name="irminsul-sender", daemon=True)
        self._sender.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:
                self._outbox.put((sender, error))

    def finalize(self) -> None:
        for preparation in self._queue.close():
            self._outbox.put((preparation.sender, UnavailableError("the server is shutting down")))
        self._outbox.put(None)
        self._sender.join(timeout=2)
        if self._metrics is not None:
            self._metrics.close()

    def _submit(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        session, start, end = _session(request)
        fields: dict[str, Any] | InvalidRequestError
        try:
            fields = {name: _own(value) for name, value in read_fields(request, REQUEST_INPUTS).items()}
            size = sum(map(_size, fields.values()))
        except InvalidRequestError as error:
            fields, size = error, 0
        preparation = _Preparation(sender, fields, session, start, end)
        self._queue.submit(preparation, size, session)

    def _prepare(self, preparation: _Preparation) -> None:
        self._outbox.put((preparation.sender, self._result(*preparation[1:])))

    def _result(
        self, fields: dict[str, Any] | InvalidRequestError, session: SessionId | None, start: bool | None, end: bool
    ) -> Prepared | Exception:
        try:
            if isinstance(fields, InvalidRequestError):
                self._preparer.sessions.enter(session, start, end)  # its flags count, as those of any bad request
                return fields
            return self._preparer.prepare(fields, session, start, end)
        except Exception as error:
            return error

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            self._send(*item)
            del item  # freed by this thread, before it waits

    def _send(self, sender: pb_utils.InferenceResponseSender, result: Prepared | Exception) -> None:
        try:
            if isinstance(result, Exception) and self._metrics is not None:
                self._metrics.count(result)
            response = refuse(result) if isinstance(result, Exception) else _plan(result)
        except Exception as error:
            response = refuse(error)
        finish(sender, response)


def _session(request: pb_utils.InferenceRequest) -> tuple[SessionId | None, bool | None, bool]:
    """Return a request's session (None: it has none), whether it opens it (None: if it is not open), and ends it.

    The input session_id names it, for HTTP cannot carry a correlation id; else the correlation id does.
    """
    inputs = read_fields(request, SESSION_INPUTS)
    if "session_id" not in inputs:
        flags = request.flags()
        return request.correlation_id() or None, bool(flags & START), bool(flags & END)
    name: bytes = inputs["session_id"]
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"session_id is not UTF-8: byte {error.start} is {name[error.start]:#x}") from None
    if not text:
        raise InvalidRequestError("session_id is empty; leave it out for a request without a session")
    return text, None, bool(inputs.get("session_end"))


def _own(value: Any) -> Any:
    """Copy what lies in the request's shared memory, which ends with `execute`."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _size(value: Any) -> int:
    """Size in bytes of the value of an input or output."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return sum(map(len, value.flat))
    if isinstance(value, list):
        return sum(map(len, value))
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


def _plan(prepared: Prepared) -> pb_utils.InferenceResponse:
    values = {
        "token_ids": prepared.token_ids,
        "chunk_ends": prepared.chunk_ends,
        "fingerprints": prepared.fingerprints,
        "request": prepared.request.pack(),
    }
    return respond(PLAN_TENSORS, seal(PLAN_TENSORS, values))


class DetokenizerModel:
    """Turns events into text. It sees cancelled clients and completed stop words first, and tells the engine."""

    def __init__(self, table: TranscriptTable) -> None:
        self._table = table
        self._stopper = Stopper()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self._one(request, request.get_response_sender())

    def finalize(self) -> None:
        self._stopper.close()

    def _one(self, request: pb_utils.InferenceRequest, sender: pb_utils.InferenceResponseSender) -> None:
        event: Event | None = None
        try:
            fields = unseal(EVENT_TENSORS, read_fields(request, EVENT_TENSORS))
            event = unpack_event(fields["event"], fields["output_ids"], fields["output_log_probs"])
            reply, why = self._table.feed(event, sender.is_cancelled)
            response = None if reply is None else respond(RESPONSE_OUTPUTS, vars(reply))
        except Exception as error:
            with about(*([event.key] if event else [])):
                response, why = refuse(error), "cancelled"
        if not finish(sender, response):
            why = "cancelled"
        if why and event is not None and event.kind not in ("finished", "error"):
            self._stopper.stop(event.key, why)


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
            with about(item[0]):
                try:
                    _tell_engine({"stop": item[0], "reason": item[1]})
                except Exception:
                    logger.exception("stop was not sent")


def _tell_engine(command: dict[str, Any]) -> None:
    """Send a control request to the engine by BLS.

    Its answer has no tensors. The stub frees what it keeps of such an answer on a thread without the interpreter lock,
    which is harmless then, and only then.
    """
    packet = seal((CONTROL_INPUT,), {CONTROL_INPUT.name: json.dumps(command)})[CONTROL_INPUT.name]
    request = pb_utils.InferenceRequest(
        model_name="irminsul_engine",
        requested_output_names=["event"],
        inputs=[pb_utils.Tensor(CONTROL_INPUT.name, to_array(CONTROL_INPUT, packet))],
    )
    for response in request.exec(decoupled=True):
        if error := response.error():
            logger.error("the engine refused a stop: %s", error.message())
