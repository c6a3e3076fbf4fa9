"""The endpoint `irminsul_unary`: the ensemble for `/infer` and unary gRPC, which refuse a model that streams.

It calls the ensemble by BLS as a stream of one response. Streams of more are not safe to read in this way, with any
release of Triton so far: a thread that waits for a response holds the lock of its stream while it takes the interpreter
lock back; if another response arrives at that moment, and a third thread begins a call, all three wait for ever.
`irminsul_generate`, which streams, is therefore an ensemble itself.
"""

from __future__ import annotations

import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from irminsul_backend.errors import InvalidRequestError, IrminsulError
from irminsul_backend.logs import about
from irminsul_backend.triton_io.steps import FINAL, Stopper, refuse
from irminsul_backend.triton_io.tensors import (
    REQUEST_INPUTS,
    RESPONSE_OUTPUTS,
    TensorSpec,
    check_shape,
    read_fields,
    to_array,
)

ENSEMBLE = "irminsul_generate"
PREFIX = f"in ensemble '{ENSEMBLE}', "
"""What Triton puts in front of a step's own message."""
WATCH_SECONDS = 0.1
MAX_THREADS = 256
CANCEL_KEY = next(spec for spec in REQUEST_INPUTS if spec.name == "cancel_key")
STREAM = next(spec for spec in REQUEST_INPUTS if spec.name == "stream")

logger = logging.getLogger(__name__)


class UnaryEndpoint:
    """Answers each request with all that the ensemble says. Each request has a thread; one more watches the clients."""

    def __init__(self) -> None:
        self._stopper = Stopper()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="irminsul-request")
        self._retired = RetiredResponses()
        self._clients: set[Client] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="irminsul-watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            client = Client(request.get_response_sender(), self._retired)
            self._clients.add(client)
            try:
                self._threads.submit(self._serve, request, client)
            except Exception as error:
                self._end(client, refuse(error))

    def finalize(self) -> None:
        """Every request that has no answer yet gets an error."""
        self._closing.set()
        self._watcher.join(timeout=2)
        self._stopper.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in list(self._clients):
            self._end(client, refuse(IrminsulError("the server is shutting down")))

    def _serve(self, request: pb_utils.InferenceRequest, client: Client) -> None:
        try:
            response = self._answer(request, client)
        except Exception as error:
            if client.key:
                self._stopper.stop(client.key)  # the ensemble may still be answering
            with about(*([client.key] if client.key else [])):
                response = refuse(error)
        self._end(client, response)

    def _end(self, client: Client, response: pb_utils.InferenceResponse) -> None:
        self._clients.discard(client)
        try:
            client.finish(response)
        except Exception:
            logger.exception("an answer was not sent")

    def _answer(self, request: pb_utils.InferenceRequest, client: Client) -> pb_utils.InferenceResponse:
        for tensor in request.inputs()[:1]:  # Triton has seen to it that all inputs have the same batch size
            check_shape(tensor.name(), tensor.as_numpy())
        key = _key(read_fields(request, (CANCEL_KEY,)).get("cancel_key"))
        inputs = [t for t in request.inputs() if t.name() not in ("cancel_key", "stream")]
        call = pb_utils.InferenceRequest(
            model_name=ENSEMBLE,
            requested_output_names=[spec.name for spec in RESPONSE_OUTPUTS],
            inputs=[*inputs, _tensor(CANCEL_KEY, key), _tensor(STREAM, False)],
        )
        with self._lock:
            if not any(other.key == key for other in list(self._clients)):
                client.key = key  # a key in use stays with the request that runs; the engine refuses this one
        answer: pb_utils.InferenceResponse | None = None
        responses = call.exec(decoupled=True)
        kept: list[Any] = [responses]
        for response in responses:
            kept.append(response)
            if error := response.error():
                answer = pb_utils.InferenceResponse(error=pb_utils.TritonError(error.message().removeprefix(PREFIX)))
            elif tensors := response.output_tensors():
                answer = pb_utils.InferenceResponse(tensors)
        self._retired.keep(kept)
        if answer is None:
            raise RuntimeError("the ensemble ended without an answer; see the server's log")
        return answer

    def _watch(self) -> None:
        """Tell the engine of clients that went away, again and again: what is still in the chunker is unknown to it."""
        while not self._closing.wait(WATCH_SECONDS):
            for client in list(self._clients):
                try:
                    if client.key and client.is_gone():
                        self._stopper.stop(client.key)
                except Exception:
                    logger.exception("could not ask whether a client is still there")


class RetiredResponses:
    """Keeps what a BLS call gave until the stub's own thread has let go of it.

    That thread drops the stub's reference to a stream of responses some time after the last one was read, and does not
    hold the interpreter lock. If it were the last reference, it would free their arrays: without the lock before
    release 24.12, which corrupts Python's memory; and since then holding a mutex for which a thread that has the lock
    may wait. It works in the order of what it was asked; when it has answered a question put to it after the stream
    ended, it has let go of the stream.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}

    def keep(self, responses: list[Any]) -> None:
        """Keep the iterator of a stream that has ended, and all of its responses."""
        self._kept[id(responses)] = responses

    def ask(self, sender: pb_utils.InferenceResponseSender) -> bool:
        """Whether the sender's client has gone. A "no" comes from that thread, a "yes" may only be remembered."""
        before = list(self._kept)
        if sender.is_cancelled():
            return True
        for key in before:
            self._kept.pop(key, None)
        return False


class Client:
    """The client of one request, at the other end of its response sender.

    Asking whether a request is cancelled after its final response, or while that is on its way, brings the whole server
    down (seen with 2.51): the two exclude each other here.
    """

    def __init__(self, sender: pb_utils.InferenceResponseSender, retired: RetiredResponses) -> None:
        self.key = ""
        """By which the engine knows the request; empty as long as it does not."""
        self._sender = sender
        self._retired = retired
        self._lock = threading.Lock()
        self._done = self._gone = False

    def finish(self, response: pb_utils.InferenceResponse) -> None:
        """Send the only response. Does nothing if one has been sent."""
        with self._lock:
            if self._done:
                return
            try:
                self._retired.ask(self._sender)
            except Exception:
                logger.exception("could not ask whether a client is still there")
            self._done = True
            tensors = response.output_tensors()
            self._sender.send(response, flags=FINAL)
            del tensors  # as in steps.send

    def is_gone(self) -> bool:
        """Whether the client has cancelled or disconnected and has no answer yet."""
        with self._lock:
            if self._done:
                return False
            self._gone = self._gone or self._retired.ask(self._sender)
            return self._gone


def _key(cancel_key: bytes | None) -> str:
    try:
        return cancel_key.decode() if cancel_key else uuid.uuid4().hex
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"cancel_key is not UTF-8: byte {error.start} is {error.object[error.start]:#x}"
        ) from None


def _tensor(spec: TensorSpec, value: str | bool) -> pb_utils.Tensor:
    return pb_utils.Tensor(spec.name, to_array(spec, value))
