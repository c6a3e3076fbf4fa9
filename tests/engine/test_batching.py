"""Many requests in one engine step: nothing of one shows in another, and everything comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from irminsul_backend.errors import CapacityError, InvalidRequestError

join = np.concatenate
Text = Callable[[int], np.ndarray]


def test_a_batch_gives_what_single_requests_give(harness, text: Text, rng: np.random.Generator) -> None:
    """Ragged prompts that share slots at different positions, prefilling in slices while others decode."""
    served = harness("one", max_batch_tokens=192)
    shared = text(500)
    served.run(join((text(35), shared)))
    prompts = []
    for i in range(12):
        start = int(rng.integers(0, 200))
        prompts.append(join((text(int(rng.integers(1, 90))), shared[start : start + 90 + 20 * i], text(i + 1))))
    answers = [p.result() for p in [served.submit(prompt, max_tokens=3 + i) for i, prompt in enumerate(prompts)]]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer.tokens) == 3 + i
        served.same_as_off(answer, prompt, max_tokens=3 + i)


def test_two_requests_share_a_step(harness, text: Text) -> None:
    """Decoding of one goes on while the other prefills; steps are counted, not timed."""
    served = harness("deep")
    first, second = served.submit(text(50), "off", max_tokens=60), served.submit(text(50), "off", max_tokens=60)
    first.result(), second.result()
    assert served.status()["counters"]["steps"] < 80, "one after the other would take 120"


def test_decode_is_not_starved_by_a_long_prefill(harness, text: Text) -> None:
    served = harness("deep", max_batch_tokens=64)
    order: list[str] = []
    talker = served.submit(text(10), max_tokens=200)
    while not talker.events or talker.events[-1].kind != "tokens":
        pass
    done = threading.Event()

    def on_event(event) -> None:
        order.append(f"{event.kind}:{len(talker.events)}")
        if event.kind == "finished":
            done.set()

    served.submit(text(640), max_tokens=1, on_event=on_event)
    assert done.wait(60)
    counts = [int(o.split(":")[1]) for o in order]
    assert counts[-1] - counts[0] >= 9, "a token of the talker between any two slices"
    talker.result()


def test_requests_wait_for_slots_and_all_finish(harness, text: Text) -> None:
    served = harness("one", capacity=600)
    prompts = [text(250) for _ in range(8)]
    pending = [served.submit(p, max_tokens=10) for p in prompts]
    for prompt, one in zip(prompts, pending, strict=True):
        served.same_as_off(one.result(), prompt, max_tokens=10)


def test_eviction_keeps_what_is_used(harness, text: Text) -> None:
    served = harness("one", capacity=1000)
    hot = text(300)
    served.run(hot)
    for _ in range(12):
        served.run(text(200))
        assert served.run(hot).usage.computed_tokens == 1


def test_a_request_that_can_never_fit_is_refused_at_once(harness, text: Text) -> None:
    served = harness("one", capacity=300)
    good = served.submit(text(200), max_tokens=5)
    message = "prompt of 290 tokens \\+ 49 to generate = 339 exceeds the KV pool of 300"
    with pytest.raises(CapacityError, match=message):
        served.submit(text(290), max_tokens=50)
    assert len(good.result().tokens) == 5


def test_later_requests_find_what_earlier_ones_compute(harness, text: Text) -> None:
    """Eight sessions start at once with one system prompt: it is computed once."""
    served = harness("deep", max_batch_tokens=128)
    system = text(1500)
    pending = [served.submit(join((system, text(40))), session=str(i)) for i in range(8)]
    computed = sum(p.result().usage.computed_tokens for p in pending)
    assert computed <= 1540 + 7 * (40 + 128)


class TestEnding:
    def test_stop_while_decoding_keeps_the_rows(self, harness, text: Text) -> None:
        served, prompt = harness("one"), text(300)
        running = served.submit(prompt, max_tokens=2000)
        while len(running.events) < 10:
            pass
        assert served.engine.stop(running.key)
        result = running.result()
        assert result.finish_reason == "cancelled"
        assert result.usage.completion_tokens == len(result.tokens) < 2000
        assert served.run(prompt).usage.computed_tokens == 1
        assert not served.engine.stop(running.key), "stopping what has ended does nothing"

    def test_a_thousand_cancels_leave_nothing_held(self, harness, text: Text) -> None:
        served = harness("one", capacity=2000)
        prompt = text(150)
        served.run(prompt)
        pending = []
        for i in range(1000):
            one = served.submit(join((prompt[: 50 + i % 100], text(20))), max_tokens=50)
            served.engine.stop(one.key)
            pending.append(one)
        assert {p.result().finish_reason for p in pending} == {"cancelled"}
        assert served.run(prompt).usage.prompt_tokens == 150

    def test_end_ids_and_length(self, harness, text: Text) -> None:
        served, prompt = harness("deep"), text(60)
        free = served.run(prompt, max_tokens=12)
        assert (free.finish_reason, len(free.tokens)) == ("length", 12)
        at = free.tokens[7]
        ended = served.run(prompt, max_tokens=12, end_ids=[at])
        assert ended.finish_reason == "stop"
        assert ended.tokens == free.tokens[: free.tokens.index(at)]

    def test_one_token_prompt_and_answer(self, harness) -> None:
        result = harness("deep").run([5], max_tokens=1)
        assert (len(result.tokens), result.usage.computed_tokens) == (1, 1)

    def test_closing_ends_what_runs(self, models, text: Text) -> None:
        from irminsul_backend.chunking import PRESETS
        from irminsul_backend.engine import Engine
        from irminsul_backend.protocol import GenerationRequest
        from irminsul_backend.request_spec import SamplingParams

        engine = Engine(models["one"], 4096, PRESETS["default"])
        engine.start()
        events, started = [], threading.Event()

        def on_event(event) -> None:
            events.append(event)
            started.set()

        request = GenerationRequest(key="k", sampling=SamplingParams(max_tokens=3000))
        engine.submit(request, text(20), np.array([20], np.int32), np.zeros(1, np.uint64), on_event)
        started.wait(10)
        engine.close()
        assert events[-1].kind == "error" and "shutting down" in events[-1].error


class TestSampling:
    @pytest.mark.parametrize(
        "sampling",
        [
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"repetition_penalty": 1.2},
            {"temperature": 0.8, "seed": 1},
            {"temperature": 0.8, "seed": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
        ],
        ids=lambda s: "+".join(s),
    )
    def test_every_parameter_works_in_a_batch(self, harness, text: Text, sampling: dict) -> None:
        served, prompt, other = harness("deep"), text(80), text(90)
        plain = served.run(other, max_tokens=12)
        pending = [served.submit(prompt, max_tokens=12, sampling=sampling), served.submit(other, max_tokens=12)]
        first, second = (p.result() for p in pending)
        assert len(first.tokens) == 12
        assert second.tokens == plain.tokens
        assert served.run(prompt, max_tokens=12, sampling=sampling).tokens == first.tokens

    def test_bad_words_do_not_appear(self, harness, text: Text) -> None:
        served, prompt = harness("deep"), text(80)
        free = served.run(prompt, max_tokens=8).tokens
        held = served.run(prompt, max_tokens=8, bad_words=[[free[2]], free[4:6]]).tokens
        assert held[:2] == free[:2] and free[2] not in held

    def test_a_fault_in_one_requests_sampling_fails_that_one(self, harness, text: Text, monkeypatch) -> None:
        served, prompt = harness("deep"), text(80)
        plain = served.run(prompt, max_tokens=30)
        good = served.submit(prompt, max_tokens=30)

        def broken(self) -> np.ndarray:
            if self.repetition == 1.5:
                raise RuntimeError("no such thing")
            return np.empty(0, np.int64)

        monkeypatch.setattr("irminsul_backend.engine.adjustment.Adjustment.banned", broken)
        bad = served.submit(text(50), max_tokens=30, sampling={"repetition_penalty": 1.5})
        with pytest.raises(AssertionError, match="sampling failed: RuntimeError: no such thing"):
            bad.result()
        assert good.result().tokens == plain.tokens
        assert "cache_resets" not in served.status()["counters"]


class TestFaults:
    def test_non_finite_rows_are_caught_and_recomputed(self, harness, text: Text) -> None:
        """Poison a donor's rows: the next request notices, drops the donor and computes the prompt itself."""
        served, body = harness("deep"), text(300)
        served.run(join((text(40), body)))
        (donor,) = served.engine.cache._idle
        served.engine.runner.rows[:, donor.slots[100:]] = float("nan")
        prompt = join((text(45), body))
        result = served.run(prompt, sampling={"temperature": 1.0, "seed": 3})
        assert result.usage.computed_tokens == len(prompt)
        assert np.isfinite(result.log_probs).all()
        assert served.status()["counters"]["distrusted"] == 1
        again = served.run(prompt)
        assert again.usage.computed_tokens == 1
        served.same_as_off(again, prompt)

    def test_a_failing_forward_pass_fails_the_request_at_fault_only(self, harness, text: Text, monkeypatch) -> None:
        served, prompt = harness("deep"), text(100)
        expected = served.run(prompt, max_tokens=20)
        real = served.engine.runner.forward

        def broken(pieces, base):
            if any((piece.token_ids == 7).sum() > 1 for piece in pieces):
                raise RuntimeError("out of memory" * 1000)
            return real(pieces, base)

        monkeypatch.setattr(served.engine.runner, "forward", broken)
        good = served.submit(prompt, max_tokens=20)
        bad = served.submit(np.full(30, 7))
        assert good.result().tokens == expected.tokens
        assert bad.done.wait(60)
        assert bad.events[-1].error.startswith("forward pass failed: RuntimeError: out of memory")
        assert len(bad.events[-1].error) < 500

    def test_a_contradiction_in_the_cache_resets_it(self, harness, text: Text) -> None:
        served, prompt = harness("one"), text(100)
        served.run(prompt)
        served.engine._core.next_check = 0.0
        served.engine.cache.pool.refs[50] += 3
        served.status()  # whether it or the idle check notices first, the engine starts afresh when idle
        served.same_as_off(served.run(prompt), prompt)
        assert served.status()["counters"]["cache_resets"] == 1

    @pytest.mark.parametrize(
        ("ids", "ends", "message"),
        [
            ([], [], "no tokens"),
            ([1, 2, 3], [2], "do not describe 3 tokens"),
            ([1, 2, 3], [3, 3], "do not describe"),
            ([1, 512], [2], r"span 1\.\.512; they must be 0\.\.511"),
            ([-1, 5], [2], r"span -1\.\.5"),
        ],
    )
    def test_contradicting_tensors_are_refused(self, harness, ids, ends, message: str) -> None:
        from irminsul_backend.protocol import GenerationRequest

        engine = harness("one").engine
        arrays = np.array(ids, np.int32), np.array(ends, np.int32), np.zeros(len(ends), np.uint64)
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit(GenerationRequest(key="k"), *arrays, lambda event: None)

    def test_a_key_in_use_is_refused(self, harness, text: Text) -> None:
        from irminsul_backend.protocol import GenerationRequest

        served = harness("one")
        running = served.submit(text(20), max_tokens=500)
        with pytest.raises(InvalidRequestError, match="in use"):
            served.engine.submit(
                GenerationRequest(key=running.key),
                text(3),
                np.array([3], np.int32),
                np.zeros(1, np.uint64),
                lambda event: None,
            )
        served.engine.stop(running.key)
        running.result()
