"""Prompts with one right answer: nothing but the documents tells it, and they tell it once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from irminsul_traffic.facts import NeedleMaker
from irminsul_traffic.words import PEOPLE, PERSON_ATTRIBUTES, RELATIONS, THING_ATTRIBUTES, THINGS, VALUES
from tokenizers import Tokenizer

from irminsul_backend.config import DEMO_MODEL

FACT = re.compile(r"The (\w+) of (\w+) is (\w+)\.")
SINGLE = re.compile(r"What is the (\w+) of (\w+)\?")
MULTI = re.compile(r"What is the (\w+) of the (\w+) of (\w+)\?")


def stated(texts: list[str]) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """(attribute, entity) -> every value said and the document it is said in"""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for document, text in enumerate(texts):
        for attribute, entity, value in FACT.findall(text):
            found.setdefault((attribute, entity), []).append((value, document))
    return found


class TestNeedle:
    @settings(deadline=None, max_examples=50)
    @given(st.integers(), st.integers(8, 80), st.integers(0, 20), st.sampled_from((1, 2)))
    def test_reading_the_documents_answers_the_question(self, seed: int, facts: int, fillers: int, hops: int) -> None:
        needle = NeedleMaker(seed).needle(hops, facts, fillers)
        found = stated([message["content"] for message in needle.messages if message["role"] == "doc"])
        assert facts - 2 <= sum(map(len, found.values())) <= facts
        assert all(len(values) == 1 for values in found.values()), "a fact stated twice"
        text = needle.messages[-1]["content"]
        assert needle.question.hops == hops and needle.question.text == text
        if hops == 1:
            match = SINGLE.fullmatch(text)
            assert match is not None
            assert found[match.groups()][0][0] == needle.question.answer  # type: ignore[index]
        else:
            match = MULTI.fullmatch(text)
            assert match is not None
            attribute, relation, entity = match.groups()
            bridge, first = found[relation, entity][0]
            answer, second = found[attribute, bridge][0]
            assert answer == needle.question.answer and first != second
            assert needle.question.reply == f" {bridge}: {answer}"

    def test_the_question_was_not_answered_before(self) -> None:
        for seed in range(50):
            needle = NeedleMaker(seed).needle(2, 20, 5, turns=6)
            assert needle.question.text not in [message["content"] for message in needle.messages[:-1]]

    def test_the_seed_decides(self) -> None:
        one, same, other = (NeedleMaker(seed).needle(2, 20, 5) for seed in ("a", "a", "b"))
        assert one == same != other


class TestLesson:
    @pytest.mark.parametrize("tokens", [115, 460, 1843])
    def test_every_question_is_answered_by_what_stands_before_it(self, tokens: int) -> None:
        maker = NeedleMaker(7)
        for _ in range(10):
            text, hops = maker.lesson(tokens, 0.6)
            asked = list(re.finditer(r"<\|user\|>([^<]*)<\|assistant\|> (?:(\w+): )?(\w+)<\|end\|>", text))
            assert len(asked) == len(hops) > 0
            assert len({match[1] for match in asked}) == len(asked), "asked twice"
            for match, count in zip(asked, hops, strict=True):
                found = {key: values[0][0] for key, values in stated([text[: match.start()]]).items()}
                if count == 1:
                    assert match[2] is None
                    assert found[SINGLE.fullmatch(match[1]).groups()] == match[3]  # type: ignore[index, union-attr]
                else:
                    attribute, relation, entity = MULTI.fullmatch(match[1]).groups()  # type: ignore[union-attr]
                    assert found[relation, entity] == match[2]
                    assert found[attribute, match[2]] == match[3]


def test_each_name_is_one_token_and_stands_in_one_list() -> None:
    names = [*PEOPLE, *THINGS, *VALUES, *THING_ATTRIBUTES, *PERSON_ATTRIBUTES, *RELATIONS]
    assert len(set(names)) == len(names)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert [name for name in names if len(tokenizer.encode(" " + name).ids) != 1] == []
