"""What one changed message costs a tokenizer of each kind, against tokenising the whole prompt."""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from irminsul_backend.text.library import Library
from irminsul_backend.text.tiktoken_library import TiktokenLibrary
from irminsul_backend.text.tokenizer import Tokenizer
from irminsul_backend.text.tokenizers_library import TokenizersLibrary

MESSAGES = 200
BAR = 0.1


def changed_message(model: Path, tokens: int = 100_000, repeats: int = 9) -> dict[str, Any]:
    """Time to tokenise a prompt of which one message is new, as a share of the time for a prompt never seen.

    Args:
        model: a folder with a byte-level tokenizer.json; its vocabulary is also used as a tiktoken.model.
        tokens: length of the prompt, in about 200 messages of unequal length.
        repeats: prompts; the medians of their times are given.
    """
    definition = (model / "tokenizer.json").read_text(encoding="utf-8")
    plain = TokenizersLibrary(definition, {})
    ranks = _ranks(plain, definition)
    first = len(ranks)
    added = {str(first + i): {"content": token.content} for i, token in enumerate(plain.added.values())}
    kinds: dict[str, Library] = {
        "tokenizer_json": plain,
        "tiktoken_model": TiktokenLibrary(ranks, {"added_tokens_decoder": added}),
    }
    out: dict[str, Any] = {"prompt_tokens": tokens}
    for kind, library in kinds.items():
        cold, warm = _times(library, tokens, repeats)
        out[f"{kind}_cold_ms"] = round(cold, 2)
        out[f"{kind}_changed_ms"] = round(warm, 2)
        out[f"{kind}_share"] = round(warm / cold, 4)
    met = all(out[f"{kind}_share"] <= BAR for kind in kinds)
    return {**out, "bar": f"each share <= {BAR}", "met": met}


def _times(library: Library, tokens: int, repeats: int) -> tuple[float, float]:
    """Medians in ms: a prompt never seen, the same prompt with another message in its middle."""
    rng = random.Random(0)
    mark = min(token for token in library.splitter.tokens if token.strip())
    cold, warm = [], []
    for _ in range(repeats + 1):
        tokenizer = Tokenizer(library, {})
        messages = [_message(library, rng, tokens // MESSAGES) for _ in range(MESSAGES)]
        cold.append(_milliseconds(tokenizer, mark + mark.join(messages)))
        messages[MESSAGES // 2] = _message(library, rng, tokens // MESSAGES)
        warm.append(_milliseconds(tokenizer, mark + mark.join(messages)))
    return statistics.median(cold[1:]), statistics.median(warm[1:])  # the first round warms up


def _milliseconds(tokenizer: Tokenizer, text: str) -> float:
    start = time.perf_counter()
    tokenizer.encode(text)
    return 1000 * (time.perf_counter() - start)


def _message(library: Library, rng: random.Random, tokens: int) -> str:
    """JSON as agents send it, of between half and one and a half times as many tokens."""
    wanted = int(tokens * rng.uniform(0.5, 1.5))
    words = ("result", "the", "user", "profile", "status", "Error:", "timeout", "path", "value", "東京", "née", "items")
    records: list[dict[str, Any]] = []
    length = 0
    while length < wanted:
        text = " ".join(rng.choices(words, k=rng.randint(3, 20)))
        records.append({"id": rng.randrange(10**6), "name": text, "ok": rng.random() < 0.5, "[<x>]": f"<{text[:9]}>"})
        length += len(library.encode_pieces([json.dumps(records[-1], ensure_ascii=False)])[0])
    return json.dumps(records, ensure_ascii=False)


def _ranks(library: TokenizersLibrary, definition: str) -> dict[bytes, int]:
    """The vocabulary without added tokens, in the order of its ids, which is that of its merges."""
    ids = sorted(i for i in json.loads(definition)["model"]["vocab"].values() if i not in library.added)
    return {library.token_bytes(i): rank for rank, i in enumerate(ids)}
