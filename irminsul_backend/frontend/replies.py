"""Postprocessing, without Triton: from the events of a request to the replies that its client receives."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from irminsul_backend.errors import IrminsulError
from irminsul_backend.protocol import Event, FinishReason, GenerationRequest

MAX_OPEN = 16384
"""Most transcripts that are kept. Only requests of an engine that died stay open; the oldest are dropped."""

ASK_EVERY_SECONDS = 0.05
"""Least time between two checks whether a client has disconnected; a check also waits for the request's next event."""


class Detokenizer(Protocol):
    """The part of `irminsul_backend.text.IncrementalDetokenizer` that is used here."""

    @property
    def stopped(self) -> bool: ...

    def push(self, ids: Any) -> str: ...

    def finish(self) -> str: ...


@dataclass
class Reply:
    """One response of the ensemble; the fields are its output tensors."""

    text_output: str = ""
    finish_reason: str = ""
    index: int = 0
    output_ids: list[int] = field(default_factory=list)
    output_log_probs: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    """A delta, like num_output_tokens: the sum over all replies of a request is the total."""
    num_output_tokens: int = 0
    usage: str = ""

    def add(self, other: Reply) -> None:
        """Append `other` to this reply."""
        self.text_output += other.text_output
        self.finish_reason = other.finish_reason or self.finish_reason
        self.output_ids += other.output_ids
        self.output_log_probs += other.output_log_probs
        self.num_input_tokens += other.num_input_tokens
        self.num_output_tokens += other.num_output_tokens
        self.usage = other.usage or self.usage


class Transcript:
    """Turns the events of one request into replies. Events arrive in order: one thread sends, one step receives."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer) -> None:
        self.request = request
        self.next_event = 0
        self.stop_sent = False
        self.asked_at = time.monotonic()
        """Time of the last check whether the client has disconnected, in seconds on the monotonic clock."""
        self._detokenizer = detokenizer
        self._replies = self._sent_tokens = 0
        self._whole = Reply(text_output=request.echo)
        """Without streaming: the reply accumulated so far."""

    @property
    def stopped(self) -> bool:
        """Whether a stop word is complete; what the engine generates after it is not sent."""
        return self._detokenizer.stopped

    def feed(self, event: Event) -> Reply | None:
        """Take the next event; returns the reply to send now, or None."""
        self.next_event = event.index + 1
        reply = self._one(event)
        if self.request.stream:
            if reply is not None and self._replies == 0:
                reply.text_output = self.request.echo + reply.text_output
        else:
            if reply is not None:
                self._whole.add(reply)
            reply = self._whole if event.kind == "finished" else None
        if reply is not None:
            reply.index = self._replies
            self._replies += 1
        return reply

    def _one(self, event: Event) -> Reply | None:
        reply = Reply()
        text = self._detokenizer
        if text.stopped and event.kind != "finished":
            return None
        if len(event.token_ids) and not text.stopped:
            reply.text_output = text.push(event.token_ids)
            reply.output_ids = [int(i) for i in event.token_ids]
            reply.output_log_probs = [float(p) for p in event.log_probs]
            reply.num_output_tokens = len(reply.output_ids)
            self._sent_tokens += len(reply.output_ids)
        if event.kind == "finished":
            if not text.stopped:
                reply.text_output += text.finish()
            reply.finish_reason = "stop" if text.stopped else event.finish_reason
            if event.usage is not None:
                # Tokens that the engine generated after a stop word were not sent.
                usage = replace(event.usage, completion_tokens=self._sent_tokens)
                reply.num_input_tokens = usage.prompt_tokens
                reply.usage = json.dumps(usage.as_dict(), separators=(",", ":"))
        return reply


class TranscriptTable:
    """The transcripts of all requests in progress, by request key."""

    def __init__(
        self,
        detokenizer: Callable[[GenerationRequest], Detokenizer],
        max_open: int = MAX_OPEN,
        ask_every_s: float = ASK_EVERY_SECONDS,
    ) -> None:
        self._ask_every_s = ask_every_s
        self._detokenizer = detokenizer
        self._max_open = max_open
        self._open: OrderedDict[str, Transcript] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def feed(self, event: Event, is_cancelled: Callable[[], bool]) -> tuple[Reply | None, FinishReason]:
        """Take the next event of a request.

        Args:
            is_cancelled: asks the server whether the client has disconnected; that costs as much as a reply, so it is
                not called for every event.

        Returns:
            The reply to send now, or None, and the reason for which the engine should stop the request, or "".

        Raises:
            IrminsulError: the event is of kind `error`, or events were lost.
        """
        if event.kind in ("finished", "error"):
            transcript = self._open.pop(event.key, None)
        else:
            transcript = self._open.get(event.key)
        if event.kind == "error":
            raise IrminsulError(event.error)
        if transcript is None and event.request is not None:
            transcript = self._add(event.key, event.request)
        if transcript is None or transcript.next_event != event.index:
            self._open.pop(event.key, None)
            raise IrminsulError(f"events of request {event.key!r} were lost before number {event.index}; send it again")
        reply = transcript.feed(event)
        if event.kind == "finished" or transcript.stop_sent:
            return reply, ""
        now = time.monotonic()
        why: FinishReason = "stop" if transcript.stopped else ""
        if not why and now - transcript.asked_at >= self._ask_every_s:
            transcript.asked_at = now
            why = "cancelled" if is_cancelled() else ""
        transcript.stop_sent = bool(why)
        return reply, why

    def _add(self, key: str, request: GenerationRequest) -> Transcript:
        transcript = self._open[key] = Transcript(request, self._detokenizer(request))
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return transcript
