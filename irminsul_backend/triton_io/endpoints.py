"""The endpoints `irminsul_generate` and `irminsul_unary`, for clients that cannot name a sequence or hold a stream.

HTTP's `/generate` and `/infer` carry no correlation id. The session is an input of these two models instead, and they
call the ensemble with it by BLS. Each request has a thread; one more thread watches for clients that went away.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import triton_python_backend_utils as pb_utils

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.triton_io.server.lifeline import follow_supervisor
from irminsul_backend.triton_io.steps import END, FINAL, START, Stopper, refuse
from irminsul_backend.triton_io.tensors import (
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    SESSION_INPUTS,
    TensorSpec,
    check_shape,
    read_fields,
    to_array,
)

ENSEMBLE_PREFIX = "in ensemble 'irminsul', "
"""What Triton puts in front of a step's own message."""
WATCH_SECONDS = 0.1
MAX_THREADS = 256
KNOWN_SESSIONS = 16384
CANCEL_KEY = next(spec for spec in REQUEST_INPUTS if spec.name == "cancel_key")
STREAM = next(spec for spec in REQUEST_INPUTS if spec.name == "stream")

logger = logging.getLogger(__name__)


class Endpoint:
    """One of the two endpoints."""

    def __init__(self, streams: bool) -> None:
        """streams: whether a request may get more than one response."""
        follow_supervisor()
        self._streams = streams
        self._stopper = Stopper()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="irminsul-request")
        self._sessions = KnownSessions()
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="irminsul-watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self._threads.submit(self._serve, request, Client(request.get_response_sender()))

    def finalize(self) -> None:
        self._closing.set()
        self._stopper.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self, request: pb_utils.InferenceRequest, client: Client) -> None:
        key = uuid.uuid4().hex
        try:
            for tensor in request.inputs()[:1]:  # Triton has seen to it that all inputs have the same batch size
                check_shape(tensor.name(), tensor.as_numpy())
            fields = read_fields(request, (*SESSION_INPUTS, CANCEL_KEY))
            if fields.get("cancel_key"):
                key = fields["cancel_key"].decode(errors="replace")
            with self._lock:
                # A key in use stays with the request that runs; the engine refuses this one.
                self._clients.setdefault(key, client)
            inputs = [t for t in request.inputs() if t.name() not in ("session_id", "session_end", "cancel_key")]
            inputs.append(_tensor(CANCEL_KEY, key))
            if not self._streams:
                inputs = [t for t in inputs if t.name() != "stream"]
                inputs.append(_tensor(STREAM, False))
            self._relay(inputs, fields.get("session_id"), bool(fields.get("session_end")), client)
        except Exception as error:
            if self._clients.get(key) is client:
                self._stopper.stop(key)  # the ensemble may still be answering
            client.send(refuse(error), final=True)
        finally:
            with self._lock:
                if self._clients.get(key) is client:
                    del self._clients[key]

    def _relay(self, inputs: list[pb_utils.Tensor], session_id: bytes | None, end: bool, client: Client) -> None:
        """Send what the ensemble answers. If the guess whether the session is open was wrong, try the other way."""
        if session_id is None:
            session, choices = uuid.uuid4().hex, [START | END]
        else:
            session, last = _checked(session_id), END if end else 0
            first = 0 if session in self._sessions else START
            choices = [last | first, last | (START - first)] * 2
            self._sessions.note(session, is_open=not end)
        for attempt, flags in enumerate(choices, start=1):
            if not self._try(inputs, session, flags, client, last_try=attempt == len(choices)):
                break

    def _try(self, inputs: list[pb_utils.Tensor], session: str, flags: int, client: Client, last_try: bool) -> bool:
        """Make one attempt. True if it failed because of the START flag, with nothing sent."""
        request = pb_utils.InferenceRequest(
            model_name="irminsul",
            requested_output_names=[spec.name for spec in RESPONSE_OUTPUTS],
            inputs=inputs,
            correlation_id=session,
            flags=flags,
        )
        held: pb_utils.InferenceResponse | None = None
        for response in request.exec(decoupled=True):
            if error := response.error():
                message = error.message().removeprefix(ENSEMBLE_PREFIX)
                if held is None and not last_try and is_wrong_start(message, started=bool(flags & START)):
                    return True
                response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
            elif not response.output_tensors():
                continue
            else:
                response = pb_utils.InferenceResponse(response.output_tensors())
            if held is not None:
                client.send(held)
            held = response
        if held is None:
            raise RuntimeError("the ensemble ended without an answer; see the server's log")
        client.send(held, final=True)
        return False

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            with self._lock:
                clients = list(self._clients.items())
            for key, client in clients:
                try:
                    if client.is_gone():
                        self._stopper.stop(key)
                except Exception:
                    logger.exception("could not ask whether a client is still there")


class Client:
    """The client of one request, behind its response sender.

    Asking whether a request is cancelled after its final response, or while that is on its way, brings the whole server
    down (seen with 2.51): the two exclude each other here.
    """

    def __init__(self, sender: pb_utils.InferenceResponseSender) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._done = False
        self._gone = False

    def send(self, response: pb_utils.InferenceResponse, final: bool = False) -> None:
        """Send a response. Nothing may be sent after the final one."""
        with self._lock:
            self._done = final
            self._sender.send(response, flags=FINAL if final else 0)

    def is_gone(self) -> bool:
        """Whether the client has cancelled or disconnected since this was last asked; True once at most."""
        with self._lock:
            if self._done or self._gone:
                return False
            self._gone = self._sender.is_cancelled()
            return self._gone


class KnownSessions:
    """Sessions that this endpoint believes open: a first guess, so that most requests need one attempt."""

    def __init__(self, limit: int = KNOWN_SESSIONS) -> None:
        self._limit = limit
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, session: str) -> bool:
        with self._lock:
            return session in self._ids

    def note(self, session: str, is_open: bool) -> None:
        with self._lock:
            self._ids.pop(session, None)
            if is_open:
                self._ids[session] = None
                if len(self._ids) > self._limit:
                    self._ids.popitem(last=False)


def is_wrong_start(message: str, started: bool) -> bool:
    """Whether an error says that the START flag was set on an open session, or missing on one that is not open."""
    if started:
        return "already open" in message
    return "unknown or expired" in message or "must specify the START flag" in message


def _checked(session_id: bytes) -> str:
    try:
        text = session_id.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"session_id is not UTF-8: byte {error.start} is {session_id[error.start]:#x}"
        ) from None
    if "\0" in text:
        raise InvalidRequestError(f"session_id {text!r} holds a NUL character, at which Triton would cut it")
    if not text:
        raise InvalidRequestError("session_id is empty; leave it out for a request without a session")
    return text


def _tensor(spec: TensorSpec, value: str | bool) -> pb_utils.Tensor:
    return pb_utils.Tensor(spec.name, to_array(spec, value))
