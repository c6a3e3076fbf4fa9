"""`irminsul eval needle`: how many questions a model answers right, with and without reuse, on the same prompts.

Every prompt is asked with reuse off and also in the mode under test. Before the latter, something is asked whose
rows it can reuse: for `exact` the same prompt without its question; for `content` the same tools, documents and
history under another system message, the documents in reverse order, so that all of them are found shifted and every
two have changed places. Each prompt has a cache salt of its own and can find nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from irminsul_traffic.facts import FILLER_TOKENS, Message, Needle, NeedleMaker

from irminsul_backend.config import ServerConfig
from irminsul_backend.engine import Engine
from irminsul_backend.errors import InvalidRequestError, IrminsulError, UnsupportedModelError
from irminsul_backend.frontend.chunker import PromptPreparer
from irminsul_backend.protocol import Event

HOPS = (1, 2)
IN_FLIGHT = 8
"""Prompts in the engine at once."""
MAX_TOKENS = 8
"""Most tokens of a reply; the shipped model's are one word, or for two hops "bridge: answer", and the end."""
TOKENS_PER_FACT = 28
LEAST_FACTS, MOST_FACTS = 4, 400
"""With fewer there may be no multi-hop question; for many more the names do not suffice."""
LEAST_SHARE, ATTEMPTS = 0.9, 200
"""A prompt shorter than this share of its length is made anew, like one that is too long; so often at most."""

Verdict = Literal["right", "first_hop", "in_prompt", "other"]
Ask = Callable[[dict[str, bytes], str, str, int], "Answer"]
"""(prompt fields, reuse mode, cache salt, max_tokens) -> answer; called from several threads."""


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    reused_tokens: int


class Prompt(NamedTuple):
    """One question, as the request fields of the prompt that asks it, and what its answers are compared with."""

    fields: dict[str, bytes]
    shuffled: dict[str, bytes]
    """The fields of what is asked before it for reuse `content`."""
    unasked: dict[str, bytes]
    """The same for `exact`."""
    tokens: int
    answer: str
    first_hop: str
    """What the first of two hops leads to; empty for single-hop questions."""
    documents: str

    def judge(self, text: str) -> Verdict:
        """Judge the reply's last word. `in_prompt`: wrong, but the documents say it of something else."""
        words = re.findall(r"\w+", text)
        found = words[-1] if words else ""
        if found == self.answer:
            return "right"
        if found and found == self.first_hop:
            return "first_hop"
        return "in_prompt" if found and re.search(rf"(?<!\w){re.escape(found)}(?!\w)", self.documents) else "other"


@dataclass
class Score:
    """What became of the questions of one length, one number of hops and one reuse mode."""

    verdicts: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    same_first_token: int = 0
    """Answers whose first token is that of reuse off (both ending at once counts too)."""
    same_answer: int = 0

    def add(self, prompt: Prompt, answer: Answer, off: Answer) -> None:
        """Count one answer, given what the same prompt got with reuse off."""
        self.verdicts[prompt.judge(answer.text)] += 1
        self.prompt_tokens += answer.prompt_tokens
        self.reused_tokens += answer.reused_tokens
        self.same_first_token += answer.token_ids[:1] == off.token_ids[:1]
        self.same_answer += answer.token_ids == off.token_ids

    @property
    def prompts(self) -> int:
        return self.verdicts.total()

    def as_dict(self) -> dict[str, Any]:
        n, right = self.prompts, self.verdicts["right"]
        counts = {name: self.verdicts[name] for name in ("right", "first_hop", "in_prompt", "other")}
        return {
            "prompts": n,
            **counts,
            "accuracy": right / n,
            "interval": wilson(right, n),
            "reused_share": self.reused_tokens / self.prompt_tokens,
            "same_first_token": self.same_first_token / n,
            "same_answer": self.same_answer / n,
        }


class Generator:
    """Chunker and engine in one process: asks one prompt and waits for its greedy answer. `ask` is thread-safe."""

    def __init__(self, config: ServerConfig, longest: int, preparer: PromptPreparer | None = None) -> None:
        """Load the model. Without a configured capacity the pool holds what is in flight, not all the memory.

        Args:
            longest: most tokens of a prompt.
            preparer: of the same config, if there is one already.
        """
        # per prompt in flight: itself, what was asked before it, and as much for those that have just ended
        capacity = config.capacity_tokens or 3 * IN_FLIGHT * (longest + MAX_TOKENS)
        self.preparer = preparer or PromptPreparer(config)
        self.engine = Engine.from_config(replace(config, capacity_tokens=capacity))
        self.engine.start()
        self._numbers = itertools.count()

    def ask(self, prompt: dict[str, bytes], reuse: str, salt: str, max_tokens: int) -> Answer:
        """Raises IrminsulError if the prompt is refused or the engine fails."""
        fields = {**prompt, "reuse": reuse.encode(), "cache_salt": salt.encode(), "max_tokens": max_tokens}
        session = f"{salt}/{next(self._numbers)}"
        token_ids, ends, prints, request = self.preparer.prepare(fields, session, start=True, end=True)
        events: list[Event] = []
        done = threading.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            if event.kind in ("finished", "error"):
                done.set()

        self.engine.submit(request, token_ids, ends, prints, on_event)
        done.wait()
        usage = events[-1].usage
        if usage is None:
            raise IrminsulError(f"the engine failed: {events[-1].error}")
        written = tuple(token for event in events for token in event.token_ids)
        text = self.preparer.tokenizer.decode(written)
        return Answer(written, text, usage.prompt_tokens, usage.exact_tokens + usage.shifted_tokens)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run(
    config: ServerConfig,
    reuse: str,
    lengths: Sequence[int],
    prompts: int,
    seed: int,
    on_done: Callable[[int], object] = lambda n: None,
) -> list[dict[str, Any]]:
    """Ask `prompts` single-hop and as many multi-hop questions for each length.

    Args:
        reuse: `off`, `exact` or `content`; `off` is always measured too.
        lengths: most tokens of a prompt, by the model's own tokenizer.
        on_done: called for every question that is through, in all its modes.

    Returns:
        a JSON object for each length: `length`, `mean_tokens`, `least_tokens`, `most_tokens`, and for each mode
        `single_hop` and `multi_hop` with the fields of :meth:`Score.as_dict`.

    Raises:
        InvalidRequestError: a length is too short for a prompt, or too long for the model.
    """
    preparer = PromptPreparer(config)
    limit = preparer.max_positions - MAX_TOKENS
    if max(lengths) > limit:
        raise InvalidRequestError(
            f"length {max(lengths)} is too long: the model has {limit + MAX_TOKENS} positions, and an answer takes "
            f"up to {MAX_TOKENS}; use at most {limit}"
        )
    # All are made first: a length that cannot be kept shows before the pool takes its memory and the hours begin.
    made = {
        length: {h: list(itertools.islice(make_prompts(preparer, length, h, seed), prompts)) for h in HOPS}
        for length in lengths
    }
    with Generator(config, max(lengths), preparer) as generator:
        rows = []
        for length, by_hops in made.items():
            scores = {h: evaluate(generator.ask, by_hops[h], reuse, f"{length}/{h}", on_done) for h in HOPS}
            sizes = [prompt.tokens for asked in by_hops.values() for prompt in asked]
            row: dict[str, Any] = {"length": length, "mean_tokens": sum(sizes) / len(sizes)}
            row |= {"least_tokens": min(sizes), "most_tokens": max(sizes)}
            for mode in scores[1]:
                row[mode] = {"single_hop": scores[1][mode].as_dict(), "multi_hop": scores[2][mode].as_dict()}
            rows.append(row)
        return rows


def evaluate(
    ask: Ask, prompts: Sequence[Prompt], reuse: str, salt: str, on_done: Callable[[int], object] = lambda n: None
) -> dict[str, Score]:
    """Ask every prompt in each mode, several at once; scores by mode, `off` first."""
    scores = {mode: Score() for mode in ("off", reuse)}

    def ask_one(number: int) -> dict[str, Answer]:
        prompt, answers = prompts[number], {}
        answers["off"] = ask(prompt.fields, "off", f"eval/off/{salt}/{number}", MAX_TOKENS)
        if reuse != "off":
            own = f"eval/{reuse}/{salt}/{number}"
            ask(prompt.unasked if reuse == "exact" else prompt.shuffled, "off", own, 1)
            answers[reuse] = ask(prompt.fields, reuse, own, MAX_TOKENS)
        return answers

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        try:
            for prompt, answers in zip(prompts, pool.map(ask_one, range(len(prompts))), strict=True):
                for mode, answer in answers.items():
                    scores[mode].add(prompt, answer, answers["off"])
                on_done(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return scores


def make_prompts(preparer: PromptPreparer, length: int, hops: int, seed: int) -> Iterator[Prompt]:
    """Prompts of at most `length` tokens and not much less; the same ones for the same seed and tokenizer.

    A fact for every 28 tokens, the rest is filler, whose amount follows what the prompts before it measured. Short
    prompts have fewer documents and no tools: two tools alone take about 300 tokens.
    """
    role = document_role(preparer)
    maker = NeedleMaker(f"eval/{seed}/{length}/{hops}")
    documents, tools = max(2, min(6, length // 64)), 2 * (length >= 1024)
    facts = min(max(length // TOKENS_PER_FACT, LEAST_FACTS), MOST_FACTS)
    fillers = max(0, (length * 5 // 8 - 300 * (tools > 0)) // FILLER_TOKENS)
    middle = length * (1 + LEAST_SHARE) / 2
    while True:
        sizes: list[int] = []
        for _ in range(ATTEMPTS):
            needle = maker.needle(hops, facts, fillers, documents)
            needle = needle._replace(tools=needle.tools[:tools])
            prompt = _prompt(preparer, needle, role, " ".join(maker.filler.sentence() for _ in range(2)))
            if LEAST_SHARE * length <= prompt.tokens <= length:
                yield prompt
                break
            sizes.append(prompt.tokens)
            if prompt.tokens > length and not fillers:
                facts = max(LEAST_FACTS, facts - 1)
            fillers = max(0, fillers + round((middle - prompt.tokens) / FILLER_TOKENS))
        else:
            if min(sizes) > length:
                raise InvalidRequestError(
                    f"length {length} is too short: a prompt with {LEAST_FACTS} facts and no filler has more tokens; "
                    f"use at least {least_length(preparer, role)}"
                )
            raise InvalidRequestError(
                f"length {length} cannot be kept: of {ATTEMPTS} prompts with {facts} facts none had "
                f"{LEAST_SHARE * length:.0f} to {length} tokens, they had {min(sizes)} to {max(sizes)}; "
                "choose another length"
            )


def least_length(preparer: PromptPreparer, role: str) -> int:
    """Tokens that hold the longest of some prompts with the fewest facts, for every number of hops."""
    sizes = []
    for h in HOPS:
        maker = NeedleMaker(f"eval/least/{h}")
        needles = [maker.needle(h, LEAST_FACTS, 0, 2)._replace(tools=[]) for _ in range(32)]
        sizes += [_prompt(preparer, needle, role, "").tokens for needle in needles]
    return max(sizes)


def document_role(preparer: PromptPreparer) -> str:
    """`doc`, or `user` where the chat template drops or refuses messages of that role."""
    text = "The badge of alice is amber."
    for role in ("doc", "user"):
        messages = [{"role": "system", "content": "s"}, *[{"role": role, "content": text + str(i)} for i in range(2)]]
        try:
            rendered = preparer.template.render([*messages, {"role": "user", "content": "q"}], None)
        except InvalidRequestError:
            continue
        if all(text + str(i) in rendered for i in range(2)):
            return role
    raise UnsupportedModelError(
        "the chat template shows documents neither as messages of role 'doc' nor as several of role 'user'; "
        "this evaluation needs one of the two"
    )


def _prompt(preparer: PromptPreparer, needle: Needle, role: str, header: str) -> Prompt:
    system, *rest = needle.messages
    documents = [{**m, "role": role} for m in rest if m["role"] == "doc"]
    history, question = [m for m in rest[:-1] if m["role"] != "doc"], rest[-1]
    text = "\n".join(m["content"] for m in documents)
    fields = _fields(needle, [system, *documents, *history, question])
    return Prompt(
        fields=fields,
        shuffled=_fields(needle, [{**system, "content": header}, *documents[::-1], *history]),
        unasked=_fields(needle, [system, *documents, *history]),
        tokens=len(preparer.prepare({**fields, "max_tokens": 1}, "size", start=True, end=True).token_ids),
        answer=needle.question.answer,
        first_hop=needle.question.bridge,
        documents=text,
    )


def _fields(needle: Needle, messages: list[Message]) -> dict[str, bytes]:
    fields = {"messages": json.dumps(messages).encode()}
    return fields | ({"tools": json.dumps(needle.tools).encode()} if needle.tools else {})


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share of `right` among n >= 1 (Wilson 1927)."""
    z = 1.959964
    share, width = right / n, z / (1 + z * z / n)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = width * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
