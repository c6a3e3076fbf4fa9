"""The inputs of a request: one table, from which everything else that names an input is made.

Validation (`frontend.inputs`), the tensors at the Triton border (`triton_io.tensors`), the configurations of the
Triton models, the client's options and types and the table in the docs all follow it; `make generate` rewrites the
files among them, and a test says when one is stale. To add a sampling parameter, add a field to
:class:`SamplingParams`, then use it in the sampler and in the sampling kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from irminsul_backend.errors import InvalidRequestError, shown

DType = Literal["STRING", "INT32", "UINT64", "FP32", "BOOL"]
"""Triton's names without TYPE_. A STRING holds bytes, text in UTF-8."""

MAX_WORDS = 256
"""Most stop words, and most bad words, of one request: each is looked for at every token."""
MAX_WORD_BYTES = 1024
MAX_SALT_BYTES = 256
MAX_KEY_BYTES = 128
MAX_SESSION_ID_BYTES = 128


@dataclass(frozen=True)
class Input:
    """One input of a request, all of which are optional."""

    name: str
    dtype: DType
    doc: str
    """One sentence for the docs and the client."""
    dims: int = 1
    """1, or -1 for a list of any length."""
    default: Any = None
    """Value of a request without the input; None where absence has a meaning of its own, which `doc` gives."""
    low: float | None = None
    """Smallest value allowed."""
    above: float | None = None
    """Bound that the value must exceed."""
    high: float | None = None
    """Largest value allowed."""
    choices: tuple[str, ...] = ()
    """The texts allowed; empty allows any."""
    max_bytes: int | None = None
    """Length limit of a text in UTF-8, for names: each is kept for as long as its request or its rows."""
    note: str = ""
    """What a special value means, for error messages."""
    option: str | None = ""
    """The client's name for it: "" is `name`, None is no option of the client's."""
    option_type: str = ""
    """The type that the client takes, where the tensor's does not say it."""
    option_doc: str = ""
    """What the client's option does, where that is not `doc`."""
    endpoints_only: bool = False
    """Only `irminsul_generate` and `irminsul_unary` take it."""

    @property
    def limit(self) -> str:
        """The range in words, as error messages and docs give it; "" where every value of the type is allowed."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.max_bytes is not None:
            return f"at most {self.max_bytes} bytes"
        note = f" ({self.note})" if self.note else ""
        over = "" if self.above is None else f"over {self.above}"
        if self.high is not None:
            return (f"{over} and at most {self.high}" if over else f"between {self.low} and {self.high}") + note
        if self.dtype == "FP32":
            least = f" {over}" if over else "" if self.low is None else f", at least {self.low}"
            return f"a finite number{least}{note}"
        return "" if self.low is None else f"at least {self.low}{note}"

    def check(self, value: Any) -> None:
        """Raise InvalidRequestError if a value of the right type is out of range; the message has value and limit."""
        if self.choices:
            allowed = value in self.choices
        elif self.max_bytes is not None:
            size = len(value.encode("utf-8", "surrogatepass"))
            if size > self.max_bytes:
                raise InvalidRequestError(
                    f"{self.name} is {size} bytes long; {self.limit} are allowed; it begins with {shown(value, 32)}"
                )
            return
        elif self.dtype in ("STRING", "BOOL") or self.dims != 1:
            return
        else:
            allowed = (
                math.isfinite(value)
                and (self.low is None or value >= self.low)
                and (self.above is None or value > self.above)
                and (self.high is None or value <= self.high)
            )
        if not allowed:
            raise InvalidRequestError(f"{self.name} is {shown(value)}; it must be {self.limit}")


def _parameter(dtype: DType, default: Any, doc: str, **more: Any) -> Any:
    """A dataclass field that is an input; the field gives the input its name."""
    return field(default=default, metadata={"input": Input("", dtype, doc, default=default, **more)})


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings follow TRT-LLM's tensors; the defaults are greedy.

    The ranges end where no use is known and numbers would leave float32. Presence and frequency penalty have OpenAI's,
    which vLLM and SGLang refuse to exceed as well. A temperature over 2 is of little use, but TRT-LLM's clients may
    send it; at 100 the logits of real models are as good as equal. Low temperatures are sampled as they are, not raised
    to 0.01 (vLLM) or taken for 0 (SGLang). Repetition penalties lie between 1 and 2 in practice and SGLang allows no
    others; below 1 they reward.
    """

    max_tokens: int = _parameter(
        "INT32", 128, "Most tokens to generate; the default shrinks to what the model's context has room for.", low=1
    )
    temperature: float = _parameter(
        "FP32", 0.0, "Divides the logits; 0 is greedy.", low=0, high=100, note="0 is greedy"
    )
    top_k: int = _parameter(
        "INT32", 0, "Sample among the k most likely tokens; 0 sets no limit.", low=0, note="0 = no limit"
    )
    top_p: float = _parameter(
        "FP32", 1.0, "Sample among the most likely tokens that together reach this probability.", above=0, high=1
    )
    min_p: float = _parameter(
        "FP32", 0.0, "Leave out tokens less likely than this times the likeliest one.", low=0, high=1
    )
    repetition_penalty: float = _parameter(
        "FP32",
        1.0,
        "Divides the positive logits of tokens in prompt and answer, multiplies the negative ones.",
        low=0.1,
        high=10,
        note="1 = none",
    )
    presence_penalty: float = _parameter(
        "FP32", 0.0, "Subtracted once from the logits of tokens in the answer.", low=-2, high=2
    )
    frequency_penalty: float = _parameter(
        "FP32", 0.0, "Subtracted from the logits of tokens in the answer, once per occurrence.", low=-2, high=2
    )
    seed: int | None = _parameter(
        "UINT64",
        None,
        "Same seed, same request, same reuse history: same tokens. Drawn at random if absent.",
        low=0,
        high=(1 << 64) - 1,
    )


SAMPLING_INPUTS: tuple[Input, ...] = tuple(replace(f.metadata["input"], name=f.name) for f in fields(SamplingParams))
"""The fields of SamplingParams, in order."""

PROMPT_INPUTS: tuple[Input, ...] = (
    Input("text_input", "STRING", "A prompt that is tokenised as it is.", option="text"),
    Input(
        "messages",
        "STRING",
        "Chat messages, rendered with the model's own chat template; JSON on the wire.",
        option_type="Sequence[Mapping[str, Any]]",
    ),
    Input("input_ids", "INT32", "A prompt that is tokenised already.", dims=-1),
)
"""A request has exactly one of these."""

INPUTS: tuple[Input, ...] = (
    *PROMPT_INPUTS,
    Input(
        "tools",
        "STRING",
        "Tool schemas for the chat template, only with messages; JSON on the wire.",
        option_type="Sequence[Mapping[str, Any]]",
    ),
    *SAMPLING_INPUTS,
    Input("stop_words", "STRING", f"Texts that end the answer, at most {MAX_WORDS}; they are not part of it.", dims=-1),
    Input("bad_words", "STRING", f"Texts that must not be generated, at most {MAX_WORDS}.", dims=-1),
    Input("end_id", "INT32", "Token id that ends the answer, instead of the model's own."),
    Input("ignore_eos", "BOOL", "No token id ends the answer.", default=False),
    Input("stream", "BOOL", "Send tokens as they come instead of one response.", default=False, option=None),
    Input("return_log_probs", "BOOL", "Return each token's natural log-probability under the model.", default=False),
    Input(
        "exclude_input_in_output",
        "BOOL",
        "Leave the prompt's text out of the answer's.",
        default=True,
        option="echo",
        option_doc="Put the prompt's text in front of the answer.",
    ),
    Input("return_num_input_tokens", "BOOL", "Accepted for TRT-LLM's clients; always returned.", option=None),
    Input("return_num_output_tokens", "BOOL", "Accepted for TRT-LLM's clients; always returned.", option=None),
    Input("return_perf_metrics", "BOOL", "Accepted for TRT-LLM's clients; `usage` is always returned.", option=None),
    Input(
        "reuse",
        "STRING",
        "Which cached rows may be used: none, those of the exact prefix, or those of any known content.",
        default="content",
        choices=("off", "exact", "content"),
    ),
    Input(
        "allow_special_tokens",
        "BOOL",
        "What is written like a special token is one; by default in text_input, and not in messages and tools.",
    ),
    Input(
        "cache_salt",
        "STRING",
        "Only requests of equal salt share cached rows; by default all without a salt share.",
        max_bytes=MAX_SALT_BYTES,
    ),
    Input(
        "timeout_ms",
        "INT32",
        "Time in milliseconds, waiting included, after which a request that has not finished fails.",
        default=0,
        low=0,
        high=(1 << 31) - 1,
        note="0 = none",
    ),
    Input(
        "priority",
        "INT32",
        "Requests of higher priority are computed first, and may displace those of lower priority.",
        default=0,
        low=-10,
        high=10,
    ),
    Input(
        "cancel_key",
        "STRING",
        "Name by which the request can be stopped; by default a random one.",
        max_bytes=MAX_KEY_BYTES,
        option=None,
    ),
    Input(
        "session_id",
        "STRING",
        "Session of a request that comes over HTTP.",
        max_bytes=MAX_SESSION_ID_BYTES,
        option=None,
        endpoints_only=True,
    ),
    Input(
        "session_end",
        "BOOL",
        "The session ends with this request.",
        default=False,
        option=None,
        endpoints_only=True,
    ),
)
"""Every input, in the order of the docs and of the Triton models' configurations."""

BY_NAME: dict[str, Input] = {spec.name: spec for spec in INPUTS}
REUSE_POLICIES = BY_NAME["reuse"].choices
"""Names of the reuse policies; `cache.policy` has one object for each."""
