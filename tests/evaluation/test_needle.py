"""The questions keep their length and have one right answer; the scorer can fail; each mode finds what it may."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.errors import InvalidRequestError, IrminsulError, UnsupportedModelError
from irminsul_backend.evaluation import needle
from irminsul_backend.evaluation.needle import Answer, Generator, Prompt, evaluate, make_prompts, wilson
from irminsul_backend.frontend.chunker import PromptPreparer


@pytest.fixture(scope="module")
def preparer() -> PromptPreparer:
    return PromptPreparer(ServerConfig())


def prompts(preparer: PromptPreparer, length: int, hops: int, count: int, seed: int = 0) -> list[Prompt]:
    return list(itertools.islice(make_prompts(preparer, length, hops, seed), count))


def messages(fields: dict[str, bytes]) -> list[dict[str, str]]:
    return json.loads(fields["messages"])


def texts(fields: dict[str, bytes], role: str) -> list[str]:
    return [m["content"] for m in messages(fields) if m["role"] == role]


class TestPrompts:
    @pytest.mark.parametrize("length", [128, 256, 512, 1024, 2048])
    def test_come_near_to_their_length_but_not_over(self, preparer: PromptPreparer, length: int) -> None:
        for prompt in prompts(preparer, length, 2, 4):
            found = preparer.prepare({**prompt.fields, "max_tokens": 1}, "one", start=True, end=True)
            assert prompt.tokens == len(found.token_ids)
            assert 0.9 * length <= prompt.tokens <= length

    def test_are_the_same_for_the_same_seed_only(self, preparer: PromptPreparer) -> None:
        first = prompts(preparer, 256, 1, 3)
        assert prompts(preparer, 256, 1, 3) == first
        assert not {p.documents for p in prompts(preparer, 256, 1, 3, seed=1)} & {p.documents for p in first}

    def test_the_answer_follows_from_the_documents(self, preparer: PromptPreparer) -> None:
        for prompt in prompts(preparer, 512, 1, 8):
            asked = re.fullmatch(r"What is (the \w+ of \w+)\?", texts(prompt.fields, "user")[-1])
            assert asked
            assert f"{asked[1]} is {prompt.answer}.".lower() in prompt.documents.lower()
            assert prompt.first_hop == ""
        for prompt in prompts(preparer, 512, 2, 8):
            asked = re.fullmatch(r"What is (the \w+) of (the \w+ of \w+)\?", texts(prompt.fields, "user")[-1])
            assert asked
            facts = [f"{asked[2]} is {prompt.first_hop}.", f"{asked[1]} of {prompt.first_hop} is {prompt.answer}."]
            places = [[fact.lower() in text.lower() for text in texts(prompt.fields, "doc")] for fact in facts]
            assert [sum(place) for place in places] == [1, 1]
            assert places[0] != places[1], "both facts stand in one document"

    def test_what_is_asked_before_has_the_documents_but_not_the_question(self, preparer: PromptPreparer) -> None:
        (prompt,) = prompts(preparer, 1024, 2, 1)
        asked, before, unasked = messages(prompt.fields), messages(prompt.shuffled), messages(prompt.unasked)
        assert unasked == asked[:-1]
        assert texts(prompt.shuffled, "doc") == texts(prompt.fields, "doc")[::-1]
        assert texts(prompt.shuffled, "user") == texts(prompt.fields, "user")[:-1]
        assert before[0]["role"] == asked[0]["role"] == "system"
        assert before[0]["content"] != asked[0]["content"]
        assert prompt.fields["tools"] == prompt.shuffled["tools"] == prompt.unasked["tools"]

    def test_a_length_without_room_is_refused(self, preparer: PromptPreparer) -> None:
        with pytest.raises(InvalidRequestError, match=r"length 40 is too short: .* 4 facts .* use at least \d+"):
            prompts(preparer, 40, 2, 1)

    def test_templates_without_documents(self, tmp_path: Path) -> None:
        """Published templates drop roles they do not know: the documents then come as user messages."""
        for path in DEMO_MODEL.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, tmp_path)
        template = tmp_path / "chat_template.jinja"
        known = "{%- for m in messages if m.role in ROLES -%}{{- '<|' ~ m.role ~ '|>' ~ m.content -}}{%- endfor -%}"
        template.write_text(known.replace("ROLES", "['system', 'user', 'assistant']"))
        preparer = PromptPreparer(ServerConfig(model=str(tmp_path)))
        (prompt,) = prompts(preparer, 512, 1, 1)
        rendered = preparer.template.render(messages(prompt.fields), None)
        assert all(text in rendered for text in prompt.documents.split("\n"))
        assert prompt.answer in rendered
        template.write_text(known.replace("ROLES", "['system']"))
        with pytest.raises(UnsupportedModelError, match="role 'doc'"):
            prompts(PromptPreparer(ServerConfig(model=str(tmp_path))), 512, 1, 1)


def prompt_of(number: int) -> Prompt:
    documents = f"The owner of falcon is alice. The badge of alice is amber{number}. The badge of bruno is jade."
    fields = {"messages": str(number).encode()}
    return Prompt(fields, {"messages": b"shuffled"}, {"messages": b"unasked"}, 9, f"amber{number}", "alice", documents)


class TestScores:
    @pytest.mark.parametrize(
        ("text", "verdict"),
        [
            (" amber0", "right"),
            ("amber0\n", "right"),
            ("alice", "first_hop"),
            ("alice:", "first_hop"),
            (" alice: amber0", "right"),
            ("The badge of alice is amber0.", "right"),
            ("alice: jade", "in_prompt"),
            ("jade", "in_prompt"),
            ("owner of falcon", "in_prompt"),
            ("jad", "other"),
            ("amber0 amber1", "other"),
            ("amber", "other"),
            ("Amber0", "other"),
            ("", "other"),
            ("(", "other"),
        ],
    )
    def test_verdicts(self, text: str, verdict: str) -> None:
        assert prompt_of(0).judge(text) == verdict

    def test_an_empty_answer_is_not_the_first_hop_of_a_single_hop_question(self) -> None:
        assert prompt_of(0)._replace(first_hop="").judge(" ") == "other"

    @staticmethod
    def stub(answer: Callable[[str, int], str], asked: list[tuple[str, str, str]] | None = None) -> needle.Ask:
        def ask(fields: dict[str, bytes], reuse: str, salt: str, max_tokens: int) -> Answer:
            name = fields["messages"].decode()
            if asked is not None:
                asked.append((name, reuse, salt))
            text = answer(reuse, int(name)) if name.isdecimal() else ""
            return Answer(tuple(text.encode()), text, 10, 0 if reuse == "off" else 6)

        return ask

    def test_right_and_wrong(self) -> None:
        asked = [prompt_of(i) for i in range(20)]
        right = evaluate(self.stub(lambda reuse, i: f" amber{i}"), asked, "off", "s")
        assert list(right) == ["off"]
        assert right["off"].as_dict()["accuracy"] == 1
        wrong = evaluate(self.stub(lambda reuse, i: f"amber{i + 1}"), asked, "off", "s")["off"].as_dict()
        assert (wrong["accuracy"], wrong["right"], wrong["other"]) == (0, 0, 20)
        half = evaluate(self.stub(lambda reuse, i: f"amber{i}" if i % 4 else "alice"), asked, "off", "s")["off"]
        assert half.as_dict()["accuracy"] == 0.75
        assert half.as_dict()["first_hop"] == 5

    def test_modes_are_scored_apart(self) -> None:
        ask = self.stub(lambda reuse, i: f"amber{i}" if reuse == "off" or i < 5 else "jade")
        scores = evaluate(ask, [prompt_of(i) for i in range(20)], "content", "s")
        off, content = scores["off"].as_dict(), scores["content"].as_dict()
        assert (off["accuracy"], off["same_first_token"], off["same_answer"], off["reused_share"]) == (1, 1, 1, 0)
        assert (content["accuracy"], content["in_prompt"]) == (0.25, 15)
        assert (content["same_first_token"], content["same_answer"]) == (0.25, 0.25)
        assert content["reused_share"] == 0.6

    @pytest.mark.parametrize(("reuse", "before"), [("content", "shuffled"), ("exact", "unasked")])
    def test_each_prompt_finds_only_what_was_asked_before_it(self, reuse: str, before: str) -> None:
        asked: list[tuple[str, str, str]] = []
        evaluate(self.stub(lambda reuse, i: "", asked), [prompt_of(i) for i in range(12)], reuse, "s")
        by_salt: dict[str, list[tuple[str, str]]] = {}
        for name, mode, salt in asked:
            by_salt.setdefault(salt, []).append((name, mode))
        expected = [[(str(i), "off")] for i in range(12)]
        expected += [[(before, "off"), (str(i), reuse)] for i in range(12)]
        assert sorted(by_salt.values()) == sorted(expected)

    def test_an_error_ends_the_evaluation(self) -> None:
        def ask(*args: Any) -> Answer:
            raise IrminsulError("the engine failed: x")

        with pytest.raises(IrminsulError, match="the engine failed: x"):
            evaluate(ask, [prompt_of(i) for i in range(50)], "off", "s")

    @pytest.mark.parametrize(
        ("right", "n", "interval"),
        [(0, 10, (0.0, 0.2775)), (50, 100, (0.4038, 0.5962)), (95, 100, (0.8882, 0.9785)), (100, 100, (0.9630, 1.0))],
    )
    def test_wilson(self, right: int, n: int, interval: tuple[float, float]) -> None:
        assert wilson(right, n) == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("hops", [1, 2])
def test_the_least_length_that_an_error_names_can_be_kept(preparer: PromptPreparer, hops: int) -> None:
    with pytest.raises(InvalidRequestError, match="too short") as caught:
        prompts(preparer, 16, hops, 1)
    least = int(str(caught.value).split()[-1])
    assert len(prompts(preparer, least, hops, 20, seed=3)) == 20
    with pytest.raises(InvalidRequestError, match="too short"):
        prompts(preparer, least * 3 // 4, hops, 20, seed=3)


class TestEngine:
    """The real engine over a model whose rows do not depend on their context."""

    @pytest.mark.parametrize(("reuse", "least"), [("exact", 0.75), ("content", 0.5)])
    def test_reuse_changes_nothing_where_it_must_not(self, one_layer: Path, reuse: str, least: float) -> None:
        done: list[int] = []
        (row,) = needle.run(ServerConfig(model=str(one_layer), threads=1), reuse, [256], 6, 0, done.append)
        assert sum(done) == 12
        assert row["length"] == 256
        assert 230 <= row["least_tokens"] <= row["mean_tokens"] <= row["most_tokens"] <= 256
        for kind in ("single_hop", "multi_hop"):
            assert row["off"][kind]["reused_share"] == 0
            assert row[reuse][kind]["reused_share"] > least
            assert row[reuse][kind]["same_answer"] == 1
            assert row[reuse][kind]["right"] == row["off"][kind]["right"]

    def test_content_is_found_shifted(self, one_layer: Path) -> None:
        config = ServerConfig(model=str(one_layer), threads=1)
        with Generator(config, 512) as generator:
            (prompt,) = prompts(generator.preparer, 512, 2, 1)
            generator.ask(prompt.shuffled, "off", "a", 1)
            found = generator.ask(prompt.fields, "content", "a", 1)
            assert found.prompt_tokens == prompt.tokens
            assert found.reused_tokens > 0.7 * prompt.tokens
            assert generator.ask(prompt.fields, "exact", "b", 1).reused_tokens == 0, "another salt"
            generator.ask(prompt.unasked, "off", "c", 1)
            assert generator.ask(prompt.fields, "exact", "c", 1).reused_tokens > 0.8 * prompt.tokens

    def test_failures_are_named(self, one_layer: Path) -> None:
        config = ServerConfig(model=str(one_layer), threads=1)
        with pytest.raises(InvalidRequestError, match=r"length 4089 is too long: the model has 4096 .* at most 4088"):
            # the length is to blame, whatever the pool would take
            needle.run(replace(config, capacity_tokens=10**15), "off", [256, 4089], 1, 0)
        with pytest.raises(IrminsulError, match="exceeds the KV pool of 200"):
            needle.run(replace(config, capacity_tokens=200), "off", [256], 1, 0)
