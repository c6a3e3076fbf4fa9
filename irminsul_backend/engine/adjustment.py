"""Penalties and bad words: what a request does to its logits before a token is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from irminsul_backend.engine.batch import pinned, upload_together
from irminsul_backend.protocol import GenerationRequest

_NONE = np.empty(0, np.int64)


class BadWords:
    """Token sequences that must not be completed, and how far the answer has come in each of them."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        unique = sorted({tuple(word) for word in words if word}, key=len)
        self._single = np.array([word[0] for word in unique if len(word) == 1], np.int64)
        longer = [word for word in unique if len(word) > 1]
        # the longer words without their last tokens, one after another
        self._tokens = np.array([token for word in longer for token in word[:-1]], np.int64)
        self._last = np.array([word[-1] for word in longer], np.int64)
        self._ends = np.cumsum([len(word) - 1 for word in longer], dtype=np.int64) - 1
        self._begins = np.zeros(len(self._tokens), np.bool_)
        self._begins[self._ends[:-1] + 1] = self._begins[:1] = True
        self._matched = np.zeros(len(self._tokens), np.bool_)
        """Of each token: the answer ends with its word up to this token."""

    def accept(self, token: int) -> None:
        if len(self._tokens):
            matched = self._tokens == token
            matched[1:] &= self._matched[:-1] | self._begins[1:]
            self._matched = matched

    def banned(self) -> np.ndarray:
        """int64: the ids that would complete a word now."""
        if not len(self._tokens):
            return self._single
        return np.concatenate((self._single, self._last[self._matched[self._ends]]))


class Adjustment:
    """The penalties and bad words of one request, with what they must know of its prompt and its answer."""

    def __init__(self, request: GenerationRequest, prompt_ids: np.ndarray, vocab_size: int) -> None:
        """prompt_ids: int32 [n], not kept; the repetition penalty alone counts them."""
        p = self._params = request.sampling
        self.is_penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self._prompt = np.unique(prompt_ids).astype(np.int64) if p.repetition_penalty != 1 else _NONE
        self._prompt_on_device: Tensor | None = None
        # a word with an id that the model does not have cannot be completed
        self._bad_words = BadWords(w for w in request.bad_words if all(0 <= token < vocab_size for token in w))
        self._ids, self._counts = array("q"), array("q")
        self._place: dict[int, int] = {}

    @property
    def repetition(self) -> float:
        return self._params.repetition_penalty

    def accept(self, token: int) -> None:
        """The token is part of the answer from here on."""
        self._bad_words.accept(token)
        if self.is_penalised:
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1

    def banned(self) -> np.ndarray:
        """int64: the ids that bad words forbid now."""
        return self._bad_words.banned()

    def prompt_ids(self, device: torch.device) -> Tensor:
        """The prompt's ids that the repetition penalty concerns, int64, each once; copied to the device once."""
        if self._prompt_on_device is None or self._prompt_on_device.device != device:
            self._prompt_on_device = pinned(self._prompt, device).to(device, non_blocking=True)
        return self._prompt_on_device

    def answer_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The answer's ids, int64, each once, and what presence and frequency penalty subtract from their logits."""
        counts = np.array(self._counts, np.int64)
        return np.array(self._ids, np.int64), counts * self._params.frequency_penalty + self._params.presence_penalty


@torch.inference_mode()
def adjust(logits: Tensor, adjustments: Sequence[Adjustment]) -> None:
    """Apply penalties and bad words in place: a fixed number of torch operations, however many requests and words.

    Args:
        logits: float32 [N, vocab], contiguous.
        adjustments: N of them.
    """
    rows = np.arange(len(adjustments), dtype=np.int64) * logits.shape[1]
    bans = [a.banned() for a in adjustments]
    penalised = [(row, a) for row, a in zip(rows, adjustments, strict=True) if a.is_penalised]
    if penalised:
        _penalise(logits.view(-1), penalised)
    banned = _placed(rows, bans)
    if len(banned):
        logits.view(-1).index_fill_(0, pinned(banned, logits.device).to(logits.device, non_blocking=True), -torch.inf)


def _penalise(flat: Tensor, penalised: list[tuple[np.int64, Adjustment]]) -> None:
    """flat: all logits in one row; each request comes with the place of its first one."""
    device = flat.device
    rows = np.array([row for row, _ in penalised])
    prompts = [a.prompt_ids(device) for _, a in penalised]
    ids, less = zip(*[a.answer_ids() for _, a in penalised], strict=True)
    lengths = np.array([len(p) for p in prompts])
    repetition = np.array([a.repetition for _, a in penalised])
    at_row, length, at_answer = upload_together([rows, lengths, _placed(rows, ids)], device)
    total = int(lengths.sum())
    real = np.concatenate((repetition, np.repeat(repetition, [len(i) for i in ids]), *less))
    by_request, by_answer, subtracted = (
        pinned(real, device).to(device, non_blocking=True).split([len(rows), len(at_answer), len(at_answer)])
    )
    at_prompt = torch.cat(prompts) + at_row.repeat_interleave(length, output_size=total)
    by_prompt = by_request.repeat_interleave(length, output_size=total)
    seen, said = _repeated(flat[at_prompt], by_prompt), _repeated(flat[at_answer], by_answer) - subtracted
    # an id of both gets the answer's value, which has all three penalties
    flat[at_prompt] = seen.float()
    flat[at_answer] = said.float()


def _repeated(logits: Tensor, penalty: Tensor) -> Tensor:
    """float64: the repetition penalty makes what is positive smaller and what is negative more so."""
    logits = logits.double()
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _placed(rows: np.ndarray, ids: Sequence[np.ndarray]) -> np.ndarray:
    """int64: places in all rows put one after another, of the ids in each of them."""
    places: np.ndarray = np.concatenate([_NONE, *ids]) + np.repeat(rows, [len(i) for i in ids])
    return places
