"""Prompts that change the way agents' prompts do, on a model of one layer: the answer must equal a full prefill's.

There a row depends on its own token alone, so the output of content reuse differs from `off` by rounding only, and a
row that is wrong, misplaced or wrongly rotated shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

join = np.concatenate
Text = Callable[[int], np.ndarray]


@pytest.fixture(params=["one", "yarn"])
def served(request, harness):
    return harness(request.param)


def lines(result) -> list[tuple[int, int, int]]:
    return [tuple(s) for s in result.usage.segment_map]


@pytest.mark.parametrize("nonce_length", [1, 3], ids=["same_length", "longer"])
def test_a_nonce_in_the_first_line_keeps_the_tail(served, text: Text, nonce_length: int) -> None:
    head, tail = text(40), text(1960)
    served.run(join((head, text(1), tail)))
    prompt = join((head, text(nonce_length), tail))
    warm = served.run(prompt)
    assert warm.usage.exact_tokens == 40
    assert warm.usage.shifted_tokens >= 0.97 * len(tail)
    served.same_as_off(warm, prompt)


def test_a_clock_of_another_length_moves_the_tail(served, text: Text) -> None:
    tail = text(1500)
    served.run(join((text(9), tail)))
    prompt = join((text(11), tail))
    warm = served.run(prompt)
    assert {delta for _, _, delta in lines(warm)} == {2}
    assert warm.usage.shifted_tokens >= 0.97 * len(tail)
    served.same_as_off(warm, prompt)


@pytest.mark.parametrize("new_line", [20, 33])
def test_a_changing_line_in_the_middle(served, text: Text, new_line: int) -> None:
    before, after, history = text(1000), text(1000), text(500)
    served.run(join((before, text(20), after, history)))
    prompt = join((before, text(new_line), after, history))
    warm = served.run(prompt)
    assert warm.usage.exact_tokens == 1000
    assert warm.usage.shifted_tokens >= 0.97 * 1500
    assert lines(warm)[-1][2] == new_line - 20
    served.same_as_off(warm, prompt)


def test_a_reminder_that_rides_on_the_newest_message(served, text: Text) -> None:
    u1, reminder, a1, tool, u2 = text(300), text(80), text(200), text(250), text(60)
    served.run([u1, reminder, a1, tool])
    prompt = [u1, a1, tool, u2, reminder]
    warm = served.run(prompt)
    deltas = {delta for _, _, delta in lines(warm)}
    assert -80 in deltas, "content behind u1 moved to the front"
    assert 200 + 250 + 60 in deltas, "the reminder was reused at its new place"
    assert warm.usage.computed_tokens <= len(u2) + 32
    served.same_as_off(warm, prompt)


def test_pruned_tool_output(served, text: Text) -> None:
    results = [text(220) for _ in range(10)]
    system = text(400)
    served.run(join((system, *results)))
    stub = text(9)
    prompt = join((system, results[0], stub, *results[2:]))
    warm = served.run(prompt)
    assert lines(warm)[-1][2] == 9 - 220
    assert warm.usage.computed_tokens <= len(stub) + 32
    served.same_as_off(warm, prompt)


def test_generated_text_is_reused_in_history(served, text: Text) -> None:
    """The template writes a generation prompt that history lacks, so the answer moves."""
    system, suffix = text(300), text(7)
    first = served.run([system, suffix], max_tokens=300)
    prompt = [system, np.array(first.tokens, np.int32), text(40)]
    warm = served.run(prompt)
    assert warm.usage.computed_tokens <= 40 + 1 + 256, "at most the last, cut-off chunk of the answer"
    assert lines(warm)[-1][2] == -7
    served.same_as_off(warm, prompt)


def test_an_answer_that_tokenises_to_other_ids(served, text: Text) -> None:
    system = text(300)
    first = served.run(system, max_tokens=150)
    again = np.array(first.tokens, np.int32)
    again[[50, 100]] = (again[[50, 100]] + 1) % 500 + 2
    prompt = join((system, again, text(40)))
    warm = served.run(prompt)
    reused = np.zeros(len(prompt), bool)
    for start, length, _ in lines(warm):
        reused[start : start + length] = True
    assert reused[:350].all() and not reused[350]
    assert reused[351:400].all() and not reused[400], "reused between the two ids that differ"
    assert reused[401:440].all(), "and behind them"
    served.same_as_off(warm, prompt)


def test_several_shifts_in_one_prompt(served, text: Text) -> None:
    a, b, c, d, e, f, g, h, j = (text(64) for _ in range(9))
    served.run([a, b, c, d, e, f, g, h, j])
    prompt = [a, b, e, f, h, j, text(1)]
    warm = served.run(prompt)
    assert [delta for _, _, delta in lines(warm)] == [0, -128, -192]
    assert warm.usage.computed_tokens <= 2
    served.same_as_off(warm, prompt)


def test_many_shifts_do_not_add_up(served, text: Text) -> None:
    """One chunk moved 30 times by +37 and then back by 1110: still one rotation from the base copy."""
    chunk = text(400)
    served.run(join((text(64), chunk)))
    for step in range(1, 31):
        served.run(join((text(64 + 37 * step), chunk)), max_tokens=1)
    prompt = join((text(64), chunk, text(3)))
    warm = served.run(prompt)
    assert warm.usage.shifted_tokens == 400
    served.same_as_off(warm, prompt)


def test_known_new_known(served, text: Text) -> None:
    c1, c3 = text(300), text(300)
    served.run(join((text(50), c1)))
    served.run(join((text(70), c3)))
    prompt = join((text(40), c1, text(90), c3, text(2)))
    warm = served.run(prompt)
    assert [(length, delta) for _, length, delta in lines(warm)] == [(300, -10), (300, 360)]
    served.same_as_off(warm, prompt)


def test_what_was_computed_behind_a_hit_is_stored(served, text: Text) -> None:
    p1 = text(800)
    served.run(p1)
    p2 = join((p1[:400], text(500)))
    served.run(p2)
    warm = served.run(p2)
    assert (warm.usage.exact_tokens, warm.usage.computed_tokens) == (899, 1)
    served.same_as_off(warm, p2)


def test_rows_of_others_are_never_written(served, text: Text) -> None:
    """A prefix hit that ends inside a chunk, then other text and answers: the owner's rows stay as they are."""
    p1 = text(300)
    served.run(p1, max_tokens=20)
    (owner,) = served.engine.cache._idle
    slots = owner.slots.copy()
    before = served.engine.runner.rows[:, slots].clone()
    for n in (63, 64, 65, 128, 277):
        served.run(join((p1[:n], text(100))), max_tokens=20)
    assert (served.engine.runner.rows[:, slots] == before).all()
    warm = served.run(p1, max_tokens=20)
    assert warm.usage.computed_tokens == 1
    served.same_as_off(warm, p1, max_tokens=20)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 63, 64, 65, 128, 129])
def test_prefix_lengths(served, text: Text, n: int) -> None:
    p1 = text(400)
    served.run(p1)
    for prompt in (p1[:n], join((p1[:n], text(77)))):
        warm = served.run(prompt)
        if n >= 33:
            assert warm.usage.exact_tokens >= min(n, len(prompt) - 1) - 15
        served.same_as_off(warm, prompt)


def test_a_prompt_of_known_chunks_only(served, text: Text) -> None:
    parts = [text(150) for _ in range(6)]
    served.run([text(40), *parts])
    prompt = [parts[i] for i in (3, 0, 5, 1, 4, 2)]
    warm = served.run(prompt)
    assert warm.usage.computed_tokens == 32 + 1, "the sink and the last token"
    served.same_as_off(warm, prompt)


def test_the_last_token_is_computed_even_if_all_is_known(served, text: Text) -> None:
    prompt = text(200)
    served.run(prompt)
    for reuse in ("exact", "content"):
        assert served.run(prompt, reuse).usage.computed_tokens == 1


def test_repeats_inside_one_prompt_share_slots(served, text: Text) -> None:
    line = text(100)
    served.run(join((text(40), line)))
    prompt = join((text(40), line, text(30), line, text(30), line, text(1)))
    warm = served.run(prompt)
    assert warm.usage.shifted_tokens == 300
    served.same_as_off(warm, prompt)


def test_the_attention_sink_is_not_reused_by_content(served, text: Text) -> None:
    prompt = text(300)
    served.run(prompt)
    warm = served.run(join((text(100), prompt)))
    assert lines(warm) == [(132, 268 - 1, 100)]
    moved_down = served.run(prompt[20:])
    assert lines(moved_down)[0][0] >= 32


@pytest.mark.parametrize("preset", ["paper", "paper+s1", "paper+extension", "default", "grams"])
def test_random_edits(harness, text: Text, rng: np.random.Generator, preset: str) -> None:
    served = harness("one", preset=preset)
    pieces = [text(int(n)) for n in rng.integers(3, 300, 12)]
    for _ in range(12):
        order = rng.permutation(len(pieces))[: rng.integers(2, 9)]
        prompt = join([pieces[i] for i in order] + [text(int(rng.integers(1, 20)))])
        served.same_as_off(served.run(prompt), prompt)


class TestIsolation:
    """What one tenant computed is never served to another; a hash is a hint, not proof."""

    def test_two_salts_share_nothing(self, harness, text: Text) -> None:
        served, prompt = harness(), text(300)
        served.run(prompt, salt="a")
        other = served.run(prompt, salt="b")
        assert other.usage.computed_tokens == 300
        assert served.run(prompt, salt="a").usage.computed_tokens == 1

    def test_forced_collisions_cost_time_only(self, harness, text: Text) -> None:
        """Every chunk of every prompt carries one and the same fingerprint."""
        served = harness()
        same = np.full(64, 12345, np.uint64)
        tail = text(500)
        for prompt in (text(600), join((text(50), tail)), join((text(64), tail)), text(600)):
            result = served.run(prompt, fingerprints=same)
            served.same_as_off(result, prompt, salt="cold")

    def test_reuse_can_be_turned_off_per_request(self, harness, text: Text) -> None:
        served, prompt = harness("deep"), text(500)
        cold = served.run(prompt, "off")
        again = served.run(prompt, "off")
        assert again.usage.computed_tokens == 500
        assert (again.tokens, again.log_probs) == (cold.tokens, cold.log_probs)


class TestDeepModel:
    """Rows depend on their context: `exact` must equal `off` within rounding, cold and warm."""

    @pytest.mark.parametrize("cuts", [(63, 64, 65, 128, 300), (300, 128, 65, 64, 63)])
    def test_exact_equals_off(self, harness, text: Text, cuts: tuple[int, ...]) -> None:
        served, p1 = harness("deep"), text(400)
        served.same_as_off(served.run(p1, "exact"), p1, salt="other")
        for n in cuts:
            prompt = join((p1[:n], text(60)))
            warm = served.run(prompt, "exact")
            assert warm.usage.exact_tokens >= n - n % 16
            served.same_as_off(warm, prompt)

    def test_exact_never_takes_rows_that_content_reuse_made(self, harness, text: Text) -> None:
        served, body = harness("deep"), text(600)
        served.run(join((text(50), body)), salt="x")
        prompt = join((text(60), body))
        content = served.run(prompt, salt="x")
        assert content.usage.shifted_tokens == 599
        exact = served.run(prompt, "exact", salt="x")
        assert exact.usage.exact_tokens == 60, "only what was computed on exact context"
        served.same_as_off(exact, prompt, salt="x")
        again = served.run(prompt, "exact", salt="x")
        assert again.usage.exact_tokens == len(prompt) - 1, "the exact copy is preferred from now on"
        served.same_as_off(again, prompt, salt="x")

    def test_exact_reuses_across_turns_with_answers(self, harness, text: Text) -> None:
        served, prompt = harness("deep"), text(200)
        for _ in range(4):
            result = served.run(prompt, "exact", session="s", max_tokens=20)
            served.same_as_off(result, prompt, max_tokens=20, salt="cold")
            prompt = join((prompt, np.array(result.tokens, np.int32), text(30)))
        assert served.run(prompt, "exact", session="s").usage.exact_tokens >= len(prompt) - 31
