"""Preprocessing of a request, without Triton: from input fields to token ids, chunks and a GenerationRequest."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from irminsul_backend.chunking import PRESETS, cut, fingerprint, recut
from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import InvalidRequestError, ServerStartError, UnsupportedModelError
from irminsul_backend.frontend.inputs import RequestFields
from irminsul_backend.frontend.sessions import CutPrompt, SessionId, SessionTable, Turn
from irminsul_backend.hub.config_fields import MAX_POSITIONS, FieldReader
from irminsul_backend.hub.json_files import read_config
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import PROMPT_INPUTS, SAMPLING_INPUTS, SamplingParams
from irminsul_backend.text import ChatTemplate, Encoded, Tokenizer
from irminsul_backend.text.client_text import of_client, plain
from irminsul_backend.text.library import TooManyTokensError
from irminsul_backend.text.messages import parse_messages, parse_tools

CUT_MARKER = "<|irminsul_cut|>"
"""Marker that forces a cut where it is written in a prompt's text or messages, so that what two of them enclose is
found as a unit at any position (paper, S2). It costs no tokens: it is removed, and the text on either side is tokenised
separately."""
PROMPT_FIELDS = tuple(spec.name for spec in PROMPT_INPUTS)


class Prepared(NamedTuple):
    """A request as the chunker passes it to the engine. The arrays are read-only: the session keeps them too."""

    token_ids: np.ndarray
    """int32 [n], n >= 1, each within the model's vocabulary."""
    chunk_ends: np.ndarray
    """int32 [m], ascending, the last is n."""
    fingerprints: np.ndarray
    """uint64 [m]."""
    request: GenerationRequest


class PromptPreparer:
    """Validates requests, renders, tokenises and cuts their prompts. `prepare` may be called from any thread."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Load tokenizer, template and limits.

        Args:
            config: the server's settings.
            clock: returns seconds, for the idle limit of sessions.

        Raises:
            UnsupportedModelError: the model folder lacks a file or a field; the message names it.
            ServerStartError: the chunking preset is unknown.
        """
        if config.preset not in PRESETS:
            raise ServerStartError(f"IRMINSUL_PRESET={config.preset!r} is unknown; it must be one of {sorted(PRESETS)}")
        self._config = config
        self._preset = PRESETS[config.preset]
        path = Path(config.model) / "config.json"
        limits = FieldReader(read_config(config.model))
        self.max_positions = limits.integer("max_position_embeddings", at_most=MAX_POSITIONS)
        self.vocab_size = limits.integer("vocab_size")
        limits.check(path)
        self.tokenizer = Tokenizer.load(config.model)
        vocabulary = path.parent / self.tokenizer.file_name
        if self.tokenizer.vocab_size > self.vocab_size:
            raise UnsupportedModelError(
                f"{vocabulary} has ids up to {self.tokenizer.vocab_size - 1}, but vocab_size in "
                f"{path} is {self.vocab_size}; the two files are of different models"
            )
        self.tokenizer.least_tokens("")  # reads the whole vocabulary the first time
        self.template = ChatTemplate.load(config.model)
        self.sessions = SessionTable(config.session_ttl_s, clock)

    def prepare(self, fields: dict[str, Any], session_id: SessionId | None, start: bool | None, end: bool) -> Prepared:
        """Check one request and prepare its prompt.

        Args:
            fields: the inputs that were sent, by name: text as bytes or str, lists of text, int, float, bool, and
                int32 [n] for input_ids.
            session_id: the correlation id, or None for a request without a session.
            start, end: the request's sequence flags; they take effect even if the request is refused afterwards.
                start None: open the session if it is not open.

        Raises:
            SessionError: the session does not allow this request.
            InvalidRequestError: the request is wrong; the message gives the value and the limit.
        """
        turn = self.sessions.enter(session_id, start, end)
        values = RequestFields(fields)
        prompt, text = self._read_prompt(values)
        request = self._read_request(values, turn, len(prompt.ids), text)
        if (previous := turn.previous) is None:
            ends = cut(prompt.ids, self._preset, prompt.edges)
        else:
            ends = recut(previous.ids, previous.ends, prompt.ids, self._preset, prompt.edges, previous.edges)
        self.sessions.remember(session_id, CutPrompt(prompt.ids, prompt.edges, ends))
        return Prepared(prompt.ids, ends, fingerprint(prompt.ids, ends, request.namespace, self._preset.gram), request)

    def _read_prompt(self, values: RequestFields) -> tuple[Encoded, str | None]:
        """Return the prompt's ids and edges, and its text or, if it was sent as ids, None."""
        given = [name for name in PROMPT_FIELDS if name in values]
        if len(given) != 1:
            raise InvalidRequestError(
                f"the prompt must be given as exactly one of {', '.join(PROMPT_FIELDS)}; "
                f"this request has {' and '.join(given) or 'none'}"
            )
        if "tools" in values and "messages" not in values:
            raise InvalidRequestError(f"tools go with messages; this request has {given[0]}")
        if "input_ids" in values:
            return self._read_input_ids(values), None
        self._check_size(given[0], values.size(given[0]) + values.size("tools"))
        text = self._render(values) if "messages" in values else values.get("text_input") or ""
        if not text:
            raise InvalidRequestError(f"the prompt is empty ({given[0]}); it must hold at least one token")
        shown = plain(text).replace(CUT_MARKER, "")
        self._check_least_tokens(shown)
        prompt = self._encode(self._guarded(values, text), add_bos="text_input" in values)
        if not len(prompt.ids):
            raise InvalidRequestError(f"the prompt is empty: the tokenizer makes no token of this {given[0]}")
        return prompt, shown

    def _guarded(self, values: RequestFields, text: str) -> str:
        """Mark the client's characters in which no control token may be found; rendered messages come marked."""
        raw = "text_input" in values
        allowed = values.get("allow_special_tokens")
        if allowed is None:
            allowed = raw and not self._config.escape_special_tokens
        if allowed:
            return plain(text)
        return of_client(text) if raw else text

    def _check_least_tokens(self, text: str) -> None:
        """Refuse a text that cannot fit, before it is tokenised."""
        if len(text) > self.max_positions and (least := self.tokenizer.least_tokens(text)) >= self.max_positions:
            raise self._too_long(least)

    def _too_long(self, least: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt has at least {least} tokens; with one of an answer the model's limit is "
            f"{self.max_positions}; shorten the prompt"
        )

    def _encode(self, text: str, add_bos: bool) -> Encoded:
        """Encode a text; its edges are cut markers and, if the preset cuts there, the template's structure."""
        pieces = text.split(CUT_MARKER)
        most = self.max_positions - 1
        try:
            encoded = [
                self.tokenizer.encode(piece, add_bos=add_bos and i == 0, most=most) for i, piece in enumerate(pieces)
            ]
        except TooManyTokensError as error:
            raise self._too_long(error.count) from error
        ids = np.concatenate([e.ids for e in encoded]) if len(encoded) > 1 else encoded[0].ids
        marks = np.cumsum([len(e.ids) for e in encoded[:-1]]).astype(np.int32)
        return Encoded(ids, np.union1d(marks, self._structure(ids)).astype(np.int32))

    def _structure(self, ids: np.ndarray) -> np.ndarray:
        return self.tokenizer.edges(ids) if self._preset.structure_cuts else np.empty(0, np.int32)

    def _render(self, values: RequestFields) -> str:
        messages = parse_messages(values.get("messages") or "")
        tools = parse_tools(values.get("tools") or "") if "tools" in values else None
        text = self.template.render(messages, tools or None)
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"messages or tools hold U+{ord(text[error.start]):04X}, one half of a surrogate pair; "
                r"in JSON a character beyond U+FFFF is written as itself or as two \u escapes"
            ) from error
        self._check_size("the rendered prompt", size)
        return text

    def _check_size(self, name: str, size: int) -> None:
        limit = self._config.max_text_bytes
        if size > limit:
            raise InvalidRequestError(
                f"{name} is {size} bytes long; this server takes at most {limit} (IRMINSUL_MAX_TEXT_BYTES)"
            )

    def _read_input_ids(self, values: RequestFields) -> Encoded:
        ids = values.ids("input_ids")
        if not len(ids):
            raise InvalidRequestError("the prompt is empty (input_ids); it must hold at least one token")
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(wrong):
            raise InvalidRequestError(
                f"input_ids[{wrong[0]}] is {ids[wrong[0]]}; the model's ids go from 0 to {self.vocab_size - 1}"
            )
        ids = ids.astype(np.int32)  # a copy: the caller's array may lie in a request's shared memory
        return Encoded(ids, self._structure(ids))

    def _read_request(
        self, values: RequestFields, turn: Turn, prompt_tokens: int, text: str | None
    ) -> GenerationRequest:
        salt = values.get("cache_salt")
        if salt == "":
            raise InvalidRequestError("cache_salt is empty; leave it out, or send the text that names the tenant")
        echo = ""
        if not values.get("exclude_input_in_output"):
            echo = self.tokenizer.decode(values.ids("input_ids")) if text is None else text
        stop_words = values.words("stop_words")
        return GenerationRequest(
            key=values.get("cancel_key") or uuid.uuid4().hex,
            session_id=turn.session_key,
            namespace=self._namespace(salt, turn),
            reuse=values.get("reuse"),
            sampling=self._read_sampling(values, prompt_tokens),
            stream=values.get("stream"),
            end_ids=self._end_ids(values, stop_words),
            bad_words=self._bad_words(values),
            stop_words=stop_words,
            return_log_probs=values.get("return_log_probs"),
            echo=echo,
            timeout_ms=values.get("timeout_ms"),
            priority=values.get("priority"),
        )

    def _namespace(self, salt: str | None, turn: Turn) -> str:
        """Return the namespace in which rows are shared; as JSON, so that no salt can name a session's.

        A session's own namespace ends with it: whoever opens a session of the same id next finds nothing there.
        """
        if salt is not None:
            return json.dumps(["salt", salt])
        private = ["session", turn.session_key, turn.opening]
        return json.dumps(private if self._config.require_cache_salt else ["shared"])

    def _read_sampling(self, values: RequestFields, prompt_tokens: int) -> SamplingParams:
        room = self.max_positions - prompt_tokens
        given = {spec.name: values.get(spec.name) for spec in SAMPLING_INPUTS}
        if "max_tokens" not in values:
            given["max_tokens"] = max(1, min(given["max_tokens"], room))
        sampling = SamplingParams(**given)
        if sampling.max_tokens > room:
            remedy = f"max_tokens can be at most {room} here" if room > 0 else "shorten the prompt"
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {sampling.max_tokens}, together "
                f"{prompt_tokens + sampling.max_tokens}; the model's limit is {self.max_positions}; {remedy}"
            )
        return sampling

    def _end_ids(self, values: RequestFields, stop_words: list[str]) -> list[int]:
        """Return the ids that end the output: the model's, the one given, or none; and special tokens as stop words.

        Decoded text never contains a special token, so such a stop word cannot be found there.
        """
        end_ids = [] if values.get("ignore_eos") else list(self.tokenizer.end_ids)
        if "end_id" in values:
            end_id = values.get("end_id")
            if not 0 <= end_id < self.vocab_size:
                raise InvalidRequestError(
                    f"end_id is {end_id}; the model's ids go from 0 to {self.vocab_size - 1} "
                    "(for no end id at all set ignore_eos)"
                )
            end_ids = [] if values.get("ignore_eos") else [end_id]
        special = [token for word in stop_words if (token := self.tokenizer.special_id(word)) is not None]
        return list(dict.fromkeys((*end_ids, *special)))

    def _bad_words(self, values: RequestFields) -> list[list[int]]:
        """Return each word's ids, at the start of a line and after a space: tokenizers encode the two differently."""
        spellings = [form for word in values.words("bad_words") for form in (word, " " + word.lstrip())]
        sequences = [self.tokenizer.encode(form).ids.tolist() for form in dict.fromkeys(spellings)]
        return [ids for ids in sequences if ids]
