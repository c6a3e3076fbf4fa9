"""The benchmark of the whole engine on a GPU, made small enough for a CPU: what it measures, not how fast."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from irminsul_kernels.bench.report import Report

from irminsul_backend.benchmarks import gpu_engine as engine_bench
from irminsul_backend.chunking import PRESETS
from irminsul_backend.engine import Engine
from irminsul_backend.model import ModelConfig, parse_config
from irminsul_backend.model.loading import memory_bytes

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    for name, value in dict(
        V2_LITE=engine_bench.V2_LITE | TINY, PROMPTS=(1040, 1200), BAR_PROMPT=1200, BATCHES=(1, 3), REPEATS=2,
        DECODE_PROMPT=20, DECODE_TOKENS=12, PEER_VOCAB=256, ENERGY_SECONDS=0.01,
    ).items():  # fmt: skip
        monkeypatch.setattr(engine_bench, name, value)
    return parse_config(engine_bench.V2_LITE)


class Meter:
    """Counts ten joules a reading."""

    why_not = ""

    def __init__(self) -> None:
        self.readings = 0

    def joules(self) -> float:
        self.readings += 1
        return 10.0 * self.readings


def test_prompts_are_reused_as_their_labels_say(tiny: ModelConfig) -> None:
    engine = Engine(engine_bench.random_model(tiny, CPU, torch.float32), 8000, PRESETS["default"], max_running=3)
    engine.start()
    report = Report()
    engine_bench.first_token_times(report, engine_bench.Client(engine), Meter(), "tiny")
    engine_bench.decode_rates(report, engine_bench.Client(engine, seed=1), Meter(), "tiny")
    status = engine.status()
    engine.close()
    assert status["integrity"] == "ok"
    first = [row for row in report.rows if row.name.startswith("TTFT")]
    assert [(r.name, r.case) for r in first] == [
        (f"TTFT, {share} known", f"{n} tokens") for n in (1040, 1200) for share in ("0%", "50%", "95%")
    ]
    for row, share, n in zip(first, (0, 0.5, 0.95) * 2, (1040, 1040, 1040, 1200, 1200, 1200), strict=True):
        reused = int(row.note.split("; ")[1].split()[0])
        # all of the known text but a few tokens where a chunk could not be recognised, and the header's 51
        assert share * n - 40 <= reused <= share * n if share else reused == 0
        assert ("J a request" in row.note) == (n == 1200)
        assert row.rate == pytest.approx(n / row.time_us * 1e6)
    (bar,) = report.bars
    assert bar.value == pytest.approx(first[5].time_us / first[3].time_us)
    decoded = [row for row in report.rows if row.name == "decode step"]
    assert [r.case.split(",")[0] for r in decoded] == ["batch 1", "batch 3"]
    assert all(r.rate and r.rate > 0 for r in decoded)


class Successor:
    """Stands in for a transformers model of TINY's vocabulary: the next token is the last one and one more."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Tokens of each call."""

    def to(self, device: torch.device) -> Successor:
        return self

    def eval(self) -> Successor:
        return self

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> SimpleNamespace:
        assert (past_key_values is None) == (input_ids.shape[1] > 1), "a decode step goes on from the cache"
        self.lengths.append(input_ids.shape[1])
        logits = torch.zeros(1, 1, TINY["vocab_size"])
        logits[0, 0, (input_ids[0, -1] + 1) % TINY["vocab_size"]] = 1
        return SimpleNamespace(logits=logits, past_key_values="cache")


def test_transformers_is_timed_on_the_same_model_and_requests(
    tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Successor()

    def from_pretrained(folder: str, dtype: torch.dtype) -> Successor:
        assert {path.name for path in Path(folder).iterdir()} == {"config.json", "model.safetensors"}
        assert dtype == torch.bfloat16
        return theirs

    library = SimpleNamespace(AutoModelForCausalLM=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", library)
    report = Report()
    engine_bench.against_transformers(report, CPU)
    assert report.skipped == []
    assert [row.name for row in report.rows] == [
        f"{name}, {what}" for name in ("Irminsul", "transformers") for what in ("TTFT", "decode step")
    ]
    assert theirs.lengths == ([2048] + 63 * [1]) * 3, "the prompt at once, then 63 tokens; a warm-up and two repeats"
    assert "tokens are the same" in report.rows[2].note
    for first, step in (report.rows[:2], report.rows[2:]):
        assert first.rate == pytest.approx(2048 / first.time_us * 1e6)
        assert step.rate == pytest.approx(1e6 / step.time_us)


def test_greedy_tokens_and_times_of_transformers() -> None:
    first, step, tokens = engine_bench._transformers_times(Successor(), torch.tensor([7, 8, 253]), 4)
    assert tokens == [254, 255, 0, 1]
    assert first > 0 and step > 0


def test_medians_of_first_tokens_and_of_the_steps_after() -> None:
    times = [[1.0, 1.5, 2.0], [4.0, 6.0, 8.0], [2.0, 3.0, 4.0]]
    assert engine_bench._medians(times) == (2.0, 1.0)


def test_rate_of_the_time_in_which_all_decode() -> None:
    """Streams from 0 to 10 and from 2 to 6: eight tokens within (2, 6]."""
    streams = [list(np.arange(0.0, 11.0)), list(np.arange(2.0, 7.0))]
    assert engine_bench.window_rate(streams) == pytest.approx(8 / 4)


class TestLayersThatFit:
    config = parse_config(engine_bench.V2_LITE)

    def test_an_h200_holds_all(self) -> None:
        assert 29 * 2**30 < memory_bytes(self.config, 2) < 30 * 2**30, "15.7 B parameters in bf16"
        assert engine_bench.fit_layers(self.config, 138 * 2**30) == 27

    def test_a_smaller_gpu_holds_some_and_a_tiny_one_none(self) -> None:
        some = engine_bench.fit_layers(self.config, 23 * 2**30)
        assert 2 <= some < 27
        assert engine_bench.fit_layers(self.config, 16 * 2**30) < some
        assert engine_bench.fit_layers(self.config, 4 * 2**30) == 0


def test_no_energy_counter_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no")))
    meter = engine_bench.EnergyMeter(CPU)
    assert meter.joules() is None and meter.why_not == "ImportError: no"


def test_without_a_gpu_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_bench.main([]) == 2
    assert capsys.readouterr().err.startswith("irminsul_backend.benchmarks.gpu_engine: torch ")
