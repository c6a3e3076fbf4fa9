"""Agent-like prompts whose questions have one right answer, stated in the prompt's documents.

A *fact* is one sentence, "The badge of alice is amber.", amid filler text. A *single-hop* question asks for a fact; a
*multi-hop* one joins two, of which the first names the key of the second: "What is the badge of the owner of falcon?"
needs "The owner of falcon is alice." The two stand in different documents, in either order. The reply to it names the
bridge first, "alice: amber"; the answer is its last word. Nothing but the prompt tells an answer: every prompt draws
its facts anew.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from irminsul_traffic.agent_text import AgentText
from irminsul_traffic.words import PEOPLE, PERSON_ATTRIBUTES, RELATIONS, THING_ATTRIBUTES, THINGS, VALUES

Message = dict[str, str]
FACT_TOKENS, FILLER_TOKENS, QUESTION_TOKENS = 7, 24, 12
"""About how many tokens of the shipped tokenizer a sentence of each kind has."""


class Fact(NamedTuple):
    """The `attribute` of `entity` is `value`; `document` is where it stands."""

    attribute: str
    entity: str
    value: str
    document: int

    @property
    def sentence(self) -> str:
        """The fact in words."""
        return f"The {self.attribute} of {self.entity} is {self.value}."


class Question(NamedTuple):
    """A question about the facts, and its only right answer."""

    text: str
    answer: str
    bridge: str = ""
    """What the first of two facts says; empty for a single-hop question."""

    @property
    def hops(self) -> int:
        """The number of facts that the answer needs, 1 or 2."""
        return 2 if self.bridge else 1

    @property
    def reply(self) -> str:
        """What the assistant should say, with the space that its first word's token has."""
        return f" {self.bridge}: {self.answer}" if self.bridge else f" {self.answer}"


class Needle(NamedTuple):
    """One prompt for the chat template: the tools, the messages of which the last asks, and the right answer."""

    tools: list[dict[str, Any]]
    messages: list[Message]
    question: Question


class NeedleMaker:
    """Makes prompts; the same ones in the same order for the same seed."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.filler = AgentText(self.random.getrandbits(64))

    def needle(self, hops: int, facts: int, fillers: int, documents: int = 6, turns: int = 2) -> Needle:
        """One prompt: `facts` facts and `fillers` filler sentences in `documents` documents, then `turns` earlier
        questions with their answers, then the question."""
        single: list[Question] = []
        multi: list[Question] = []
        while not multi:
            world = self.facts(facts, documents)
            single, multi = questions(world)
        question = self.random.choice(single if hops == 1 else multi)
        others = [other for other in single + multi if other != question]
        tools = [self.filler.function() for _ in range(2)]
        messages = [{"role": "system", "content": self.filler.sentence()}]
        messages += [{"role": "doc", "content": text} for text in self.documents(world, documents, fillers)]
        for _ in range(turns):
            asked = self.random.choice(others)
            messages.append({"role": "user", "content": asked.text})
            messages.append({"role": "assistant", "content": asked.reply})
        messages.append({"role": "user", "content": question.text})
        return Needle(tools, messages, question)

    def lesson(self, tokens: int, multi_share: float, names: int = len(THINGS)) -> tuple[str, list[int]]:
        """A whole rendered session of about `tokens` tokens for training, and the hops of each of its questions.

        Documents come in groups; after each group stand questions about all that was said so far.
        """
        r = self.random
        groups = r.randint(1, 1 + min(2, tokens // 512))
        said = tokens * r.uniform(0.4, 0.7)
        facts = max(4, int(r.uniform(0.3, 0.9) * said / FACT_TOKENS))
        fillers = max(0, int((said - FACT_TOKENS * facts) / FILLER_TOKENS))
        world = self.facts(facts, 2 * groups, names)
        texts = self.documents(world, 2 * groups, fillers)
        parts, hops = [f"<|begin|><|system|>{self.filler.sentence()}" if tokens > 256 else "<|begin|>"], []
        asked_before: set[Question] = set()
        each = int((tokens - said) / QUESTION_TOKENS / groups) + 1
        for group in range(groups):
            if tokens > 512 and r.random() < 0.3:
                parts.append("<|tool_schema|>" + self.filler.tool_schema())
            parts += ["<|doc|>" + text for text in texts[2 * group : 2 * group + 2]]
            single, multi = questions([fact for fact in world if fact.document < 2 * group + 2])
            # Each question once: an earlier answer to the same one would be the easier thing to copy.
            pools = [[q for q in r.sample(pool, len(pool)) if q not in asked_before] for pool in (single, multi)]
            for _ in range(each):
                pool = pools[r.random() < multi_share] or pools[0] or pools[1]
                if not pool:
                    break
                asked = pool.pop()
                asked_before.add(asked)
                parts.append(f"<|user|>{asked.text}<|assistant|>{asked.reply}<|end|>")
                hops.append(asked.hops)
        return "".join(parts), hops

    def facts(self, count: int, documents: int, names: int = len(THINGS)) -> list[Fact]:
        """About `count` facts without a contradiction, of the first `names` things and people.

        A random part of the attributes and relations is in use, so that many facts differ in the entity alone. About
        half of the facts are pairs that a multi-hop question can join. Fewer facts if the names do not give as many.
        """
        r = self.random
        things = r.sample(THINGS[:names], min(len(THINGS[:names]), max(2, count // 2)))
        people = r.sample(PEOPLE[:names], min(len(PEOPLE[:names]), max(1, count // 3)))
        of_things = r.sample(THING_ATTRIBUTES, r.choice((1, 1, 2, len(THING_ATTRIBUTES))))
        of_people = r.sample(PERSON_ATTRIBUTES, r.choice((1, 1, 2, len(PERSON_ATTRIBUTES))))
        relations = r.sample(RELATIONS, r.randint(1, len(RELATIONS)))
        known: list[Fact] = []

        def state(attribute: str, entity: str, value: str) -> None:
            known.append(Fact(attribute, entity, value, r.randrange(documents)))

        joined = [(relation, thing) for relation in relations for thing in things]
        for relation, thing in r.sample(joined, min(len(joined), count // 3)):
            state(relation, thing, r.choice(people if relation in RELATIONS[:2] else [t for t in things if t != thing]))
        # first what is said of the targets, then the others, one of each in turn
        targets = {fact.value for fact in known}
        keys = [(a, thing) for a in of_things for thing in things] + [(a, one) for a in of_people for one in people]
        r.shuffle(keys)
        groups = [[key for key in keys if (key[1] in targets) == wanted] for wanted in (True, False)]
        while len(known) < count and any(groups):
            for group in groups:
                if group and len(known) < count:
                    state(*group.pop(), r.choice(VALUES))
        return known

    def documents(self, facts: list[Fact], count: int, fillers: int) -> list[str]:
        """Texts with their facts and a random share of `fillers` filler sentences, shuffled."""
        sentences: list[list[str]] = [[] for _ in range(count)]
        for fact in facts:
            sentences[fact.document].append(fact.sentence)
        for _ in range(fillers):
            self.random.choice(sentences).append(self.filler.sentence())
        for text in sentences:
            self.random.shuffle(text)
        return [" ".join([f"Notes {self.random.randint(1, 999)}.", *text]) for text in sentences]


def questions(facts: list[Fact]) -> tuple[list[Question], list[Question]]:
    """Every single-hop question that `facts` answer, and every multi-hop one over two documents."""
    single = [Question(f"What is the {f.attribute} of {f.entity}?", f.value) for f in facts]
    about: dict[str, list[Fact]] = {}
    for fact in facts:
        if fact.attribute not in RELATIONS:
            about.setdefault(fact.entity, []).append(fact)
    multi = [
        Question(
            f"What is the {second.attribute} of the {first.attribute} of {first.entity}?", second.value, first.value
        )
        for first in facts
        if first.attribute in RELATIONS
        for second in about.get(first.value, ())
        if second.document != first.document
    ]
    return single, multi
