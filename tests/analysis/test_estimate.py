"""The estimate of prefill work against published sizes, a sum by hand, and a config.json on disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from irminsul_backend.analysis.estimate import SIZES, estimate, load_size
from irminsul_backend.analysis.results import PromptResult, ReplayResult
from irminsul_backend.errors import UnsupportedModelError

SIZE = SIZES["deepseek-v2-lite"]


@pytest.mark.parametrize(
    ("name", "billions", "vocabulary"),
    [
        ("deepseek-v2-lite", 2.4, 102_400),
        ("deepseek-v3", 37, 129_280),
        ("kimi-k2", 32, 163_840),
        ("moonlight-16b-a3b", 2.8, 163_840),
    ],
)
def test_active_weights_are_what_the_publishers_say(name: str, billions: float, vocabulary: int) -> None:
    """They count the output head, and V3 leaves its embedding out; 5 % covers what each adds up differently."""
    size = SIZES[name]
    with_head = size.active_weights + vocabulary * size.hidden_size
    assert (
        min(abs(n / 1e9 - billions) for n in (with_head, with_head + vocabulary * size.hidden_size)) < 0.05 * billions
    )


def test_work_of_a_run_is_the_sum_over_its_tokens() -> None:
    by_hand = sum(2 * SIZE.active_weights + 2 * 27 * 16 * (128 + 64 + 128) * (p + 1) for p in range(100, 137))
    assert SIZE.prefill_flops(100, 137) == by_hand
    assert SIZE.prefill_flops(0, 100) + SIZE.prefill_flops(100, 250) == SIZE.prefill_flops(0, 250)


def test_estimate_counts_segments_by_kind() -> None:
    segments = ((0, 40, 0, True), (50, 30, 2, False), (90, 5, -3, False))
    prompt = PromptResult("s", 1, 100, 40, 32, 35, 25, segments)
    found = estimate(ReplayResult("f", "asis", "default", prompts=[prompt]), SIZE, 1e12, 500)
    assert found.flops == SIZE.prefill_flops(0, 100)
    assert found.exact_flops == SIZE.prefill_flops(0, 40)
    assert found.content_flops == SIZE.prefill_flops(50, 80) + SIZE.prefill_flops(90, 95)
    assert found.as_dict()["saved_joules"] == pytest.approx((found.exact_flops + found.content_flops) / 1e12 * 500)


def test_sizes_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**asdict(SIZE), "vocab_size": 9}))
    assert load_size(str(tmp_path)) == SIZE
    raw = asdict(SIZE)
    del raw["kv_lora_rank"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="kv_lora_rank is missing"):
        load_size(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="known are deepseek-v2-lite"):
        load_size("gpt-17")
