"""The ensemble on a real server, called with raw tensors over gRPC."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import Any

import numpy as np
import pytest

from irminsul_backend.triton_io.metric_table import METRICS

pytestmark = pytest.mark.server

PROMPT = "The agent reads the file and then it calls the tool again"
WORDY: dict[str, Any] = {"temperature": 5.0, "seed": 1}
"""Greedy, the shipped model says one word and then special tokens, which are no text."""


def usage_of(answer: Any) -> dict[str, Any]:
    usages = [response["usage"] for response in answer.responses]
    assert all(usage == "" for usage in usages[:-1])
    return json.loads(usages[-1])


class TestStreaming:
    def test_tokens_come_bit_by_bit_and_add_up_to_the_whole_answer(self, stream: Any) -> None:
        streamed = stream.ask(text_input=PROMPT, max_tokens=12, stream=True, ignore_eos=True)
        whole = stream.ask(text_input=PROMPT, max_tokens=12, stream=False, ignore_eos=True)
        assert len(streamed.responses) > 2
        assert [r["index"] for r in streamed.responses] == [[i] for i in range(len(streamed.responses))]
        assert len(whole.responses) == 1
        assert streamed.joined("output_ids") == whole.joined("output_ids")
        assert len(whole.joined("output_ids")) == 12
        assert streamed.text == whole.text

    def test_the_last_response_has_finish_reason_usage_and_counts(self, stream: Any) -> None:
        answer = stream.ask(text_input=PROMPT, max_tokens=5, stream=True, ignore_eos=True)
        reasons = [response["finish_reason"] for response in answer.responses]
        assert reasons == [""] * (len(reasons) - 1) + ["length"]
        usage = usage_of(answer)
        assert sum(answer.joined("num_output_tokens")) == usage["completion_tokens"] == 5
        assert sum(answer.joined("num_input_tokens")) == usage["prompt_tokens"]
        assert usage["exact_tokens"] + usage["shifted_tokens"] + usage["computed_tokens"] == usage["prompt_tokens"]

    def test_a_long_prompt_reports_progress_before_its_first_token(self, stream: Any) -> None:
        ids = np.random.default_rng(0).integers(0, 500, 3000, dtype=np.int32)
        answer = stream.ask(input_ids=ids, max_tokens=1, stream=True, reuse="off")
        silent = [response for response in answer.responses if not response["output_ids"] and not response["usage"]]
        assert len(silent) >= 3  # admitted, and a slice at a time of at most max_batch_tokens

    def test_log_probs_belong_to_the_tokens(self, stream: Any) -> None:
        answer = stream.ask(text_input=PROMPT, max_tokens=6, return_log_probs=True, ignore_eos=True)
        assert len(answer.joined("output_log_probs")) == 6
        assert all(p <= 0 for p in answer.joined("output_log_probs"))

    def test_the_prompt_is_repeated_when_asked_for(self, stream: Any) -> None:
        plain = stream.ask(text_input=PROMPT, max_tokens=3)
        for streamed in (False, True):
            echoed = stream.ask(text_input=PROMPT, max_tokens=3, exclude_input_in_output=False, stream=streamed)
            assert echoed.text == PROMPT + plain.text

    def test_messages_and_tools_are_rendered(self, stream: Any) -> None:
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
        messages = json.dumps([{"role": "user", "content": "hello"}])
        plain = stream.ask(messages=messages, max_tokens=2)
        with_tools = stream.ask(messages=messages, tools=json.dumps(tools), max_tokens=2)
        assert usage_of(with_tools)["prompt_tokens"] > usage_of(plain)["prompt_tokens"] > 1

    def test_a_seed_repeats_a_sampled_answer(self, stream: Any) -> None:
        request = {"text_input": PROMPT, "max_tokens": 16, "temperature": 1.0, "reuse": "off", "ignore_eos": True}
        answers = [stream.ask(**request, seed=seed).joined("output_ids") for seed in (2**64 - 1, 2**64 - 1, 7)]
        assert answers[0] == answers[1] != answers[2]

    @pytest.mark.parametrize(
        "extra",
        [
            {"presence_penalty": 0.5},
            {"frequency_penalty": -0.5},
            {"repetition_penalty": 1.3},
            {"bad_words": ["a", "the end"]},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.2, "top_p": 0.5, "min_p": 0.1, "seed": 3},
            {"end_id": 17},
            {"return_log_probs": True, "temperature": 0.1},
        ],
        ids=lambda extra: "+".join(extra),
    )
    def test_every_way_of_sampling_works_and_disturbs_nobody(self, stream: Any, extra: dict[str, Any]) -> None:
        other = stream.send(text_input=PROMPT + " on the side", max_tokens=20, ignore_eos=True)
        answer = stream.ask(text_input=PROMPT, max_tokens=6, ignore_eos="end_id" not in extra, **extra)
        assert not answer.error and len(answer.joined("output_ids")) == 6
        assert len(stream.answers([other])[0].joined("output_ids")) == 20
        assert "cache_resets" not in stream.status()["counters"]


class TestStopWords:
    def test_text_ends_before_the_stop_word_and_the_engine_stops(self, stream: Any) -> None:
        whole = stream.ask(text_input=PROMPT, max_tokens=20, ignore_eos=True, **WORDY)
        word = whole.text[8:14]
        for streamed in (False, True):
            answer = stream.ask(
                text_input=PROMPT,
                max_tokens=2000,
                stop_words=[word, "never said"],
                stream=streamed,
                ignore_eos=True,
                **WORDY,
            )
            assert answer.text == whole.text[: whole.text.index(word)]
            assert answer.responses[-1]["finish_reason"] == "stop"
            assert usage_of(answer)["completion_tokens"] == sum(answer.joined("num_output_tokens")) < 2000

    def test_status_counts_no_request_after_its_stop(self, stream: Any) -> None:
        report = stream.status()
        assert report["running"] == 0
        assert report["integrity"] == "ok"


class TestReuse:
    def test_a_shifted_prompt_is_reused(self, stream: Any) -> None:
        ids = np.random.default_rng(1).integers(0, 500, 1200, dtype=np.int32)
        stream.ask(input_ids=ids, max_tokens=1)
        usage = usage_of(stream.ask(input_ids=np.concatenate([ids[:50][::-1], ids[50:]]), max_tokens=1))
        assert usage["shifted_tokens"] > 1000
        longer = np.concatenate([np.arange(5, 42, dtype=np.int32), ids])
        shifted = usage_of(stream.ask(input_ids=longer, max_tokens=1))
        assert shifted["shifted_tokens"] > 1000
        assert {delta for _, _, delta in shifted["segment_map"]} == {37}

    def test_off_reuses_nothing_and_salts_share_nothing(self, stream: Any) -> None:
        ids = np.random.default_rng(2).integers(0, 500, 300, dtype=np.int32)
        stream.ask(input_ids=ids, max_tokens=1, cache_salt="one")
        off = usage_of(stream.ask(input_ids=ids, max_tokens=1, reuse="off", cache_salt="one"))
        other = usage_of(stream.ask(input_ids=ids, max_tokens=1, cache_salt="two"))
        same = usage_of(stream.ask(input_ids=ids, max_tokens=1, cache_salt="one"))
        assert off["computed_tokens"] == other["computed_tokens"] == 300
        assert same["computed_tokens"] < 300


class TestMetrics:
    def test_counters_follow_the_requests(self, server: Any, stream: Any) -> None:
        def read() -> dict[str, float]:
            time.sleep(1.5)  # two publications
            with urllib.request.urlopen(server.metrics_url) as page:
                found = re.findall(r"^(irminsul_\S+) (\S+)$", page.read().decode(), re.MULTILINE)
            return {name: float(value) for name, value in found}

        before = read()
        answer = stream.ask(text_input=PROMPT, max_tokens=4, ignore_eos=True, **WORDY)
        usage = usage_of(answer)
        after = read()
        for source in ("exact", "shifted", "computed"):
            name = f'irminsul_prompt_tokens_total{{source="{source}"}}'
            assert after[name] - before[name] == usage[f"{source}_tokens"]
        assert after["irminsul_generated_tokens_total"] - before["irminsul_generated_tokens_total"] == 4
        ended = 'irminsul_requests_total{outcome="length"}'
        assert after[ended] - before[ended] == 1
        stream.ask(text_input=PROMPT, max_tokens=2000, stop_words=[answer.text[4:8]], ignore_eos=True, **WORDY)
        stopped = 'irminsul_requests_total{outcome="stop"}'
        assert read()[stopped] - before[stopped] == 1
        slots = [after[f'irminsul_cache_slots{{state="{state}"}}'] for state in ("used", "capacity")]
        assert 0 < slots[0] <= slots[1]

    def test_a_scrape_is_valid_and_names_nobody(self, server: Any, stream: Any) -> None:
        stream.ask(text_input="Pharaoh", session="sphinx", max_tokens=3, ignore_eos=True, cache_salt="obelisk")
        stream.ask(text_input="Pharaoh", max_tokens=3, cancel_key="papyrus", stream=True, ignore_eos=True)
        time.sleep(1.5)  # two publications
        with urllib.request.urlopen(server.metrics_url) as page:
            text = page.read().decode()
        lines = [line for line in text.splitlines() if "irminsul_" in line and "nv_" not in line]
        kinds = dict(re.findall(r"^# TYPE (irminsul_\w+) (\w+)$", "\n".join(lines), re.MULTILINE))
        assert kinds == {spec.name: spec.kind for spec in METRICS}
        samples = [line for line in lines if not line.startswith("#")]
        assert len(samples) == len({line.rpartition(" ")[0] for line in samples}), "no series is there twice"
        assert all(re.fullmatch(r'irminsul_\w+(\{\w+="[^"\\]*"\})? [0-9.e+-]+', line) for line in samples)
        for name in (spec.name for spec in METRICS if spec.kind == "histogram"):
            buckets = [float(line.split()[1]) for line in samples if line.startswith(f"{name}_bucket")]
            count = next(float(line.split()[1]) for line in samples if line.startswith(f"{name}_count"))
            assert buckets == sorted(buckets) and buckets[-1] == count > 0, name
        assert not any(word in text for word in ("Pharaoh", "sphinx", "obelisk", "papyrus"))
