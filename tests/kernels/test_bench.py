"""The benchmark's arithmetic, tables and arguments; its checks and its flow on the interpreter."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from irminsul_kernels.bench import command, scenes
from irminsul_kernels.bench.__main__ import PARTS, build_parser, main
from irminsul_kernels.bench.report import Bar, Check, Report, Row, columns, duration

CPU = torch.device("cpu")


class TestReport:
    def make(self) -> Report:
        return Report(
            machine={"GPU": "a chip"},
            checks=[Check("decode", 1e-3, 2e-3)],
            rows=[
                Row("decode", "decode, δ = 0", "16 heads", 151.3, 3990.4, "GB/s", 0.93),
                Row("engine", "TTFT", "2048 tokens", 45_600.0, None, "", None, "a note"),
            ],
            bars=[Bar("fast", 0.9, 0.8, True), Bar("cheap", 0.05, 0.03, False), Bar("other", None, 1, True, "no chip")],
            skipped=[("FlashMLA", "not installed")],
            seconds=12.3,
        )

    def test_json_holds_everything(self) -> None:
        report = self.make()
        found = json.loads(json.dumps(report.as_dict()))
        assert found["machine"] == {"GPU": "a chip"} and found["seconds"] == 12.3
        assert found["checks"] == [{"name": "decode", "error": 1e-3, "limit": 2e-3, "met": True}]
        assert found["rows"][0]["share"] == 0.93 and found["rows"][1]["rate"] is None
        assert [b["verdict"] for b in found["bars"]] == ["met", "missed", "not measured"]
        assert found["skipped"] == [{"what": "FlashMLA", "why": "not installed"}]

    def test_the_table_shows_every_figure(self) -> None:
        text = self.make().text()
        for part in (
            "a chip",
            "1.00e-03",
            "151 us",
            "3,990 GB/s",
            "93%",
            "45.6 ms",
            "a note",
            "met",
            "missed",
            "no chip",
        ):
            assert part in text, part
        assert "FlashMLA" in text and "not installed" in text

    @pytest.mark.parametrize("error", [2.1e-3, math.nan, math.inf])
    def test_a_wrong_kernel_fails_the_run(self, error: float) -> None:
        report = Report(checks=[Check("decode", 1e-3, 2e-3), Check("extend", error, 2e-3)])
        assert report.failed and "WRONG" in report.text()
        assert not Report(checks=report.checks[:1]).failed

    @pytest.mark.parametrize(
        ("value", "at_least", "verdict"),
        [
            (0.8, True, "met"),
            (0.79, True, "missed"),
            (0.8, False, "met"),
            (0.81, False, "missed"),
            (None, True, "not measured"),
        ],
    )
    def test_bars(self, value: float | None, at_least: bool, verdict: str) -> None:
        assert Bar("bar", value, 0.8, at_least).verdict == verdict

    @pytest.mark.parametrize(
        ("us", "text"),
        [(0.4567, "0.457 us"), (12.3, "12.3 us"), (4567.0, "4.57 ms"), (2.5e6, "2.5 s"), (4.2e9, "4200 s")],
    )
    def test_durations(self, us: float, text: str) -> None:
        assert duration(us) == text

    def test_columns_line_up(self) -> None:
        lines = columns(("a", "b"), [("long cell", "x"), ("s", "y")]).splitlines()
        assert [line.index(c) for line, c in zip(lines[:1] + lines[2:], "bxy", strict=True)] == [11, 11, 11]


class TestArguments:
    def test_all_parts_by_default(self) -> None:
        assert build_parser().parse_args([]).only == list(PARTS)

    def test_parts_are_selected(self) -> None:
        assert build_parser().parse_args(["--only", "decode", "small"]).only == ["decode", "small"]

    def test_an_unknown_part_names_the_known_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            build_parser().parse_args(["--only", "decoding"])
        assert "decoding" in (err := capsys.readouterr().err) and "extend" in err

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for name, about in PARTS.items():
            assert f"{name}: {about}" in text

    def test_without_a_gpu_one_line_and_code_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main([]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == "" and line.startswith("irminsul_kernels.bench: ") and "sees no NVIDIA GPU" in line


class TestCommand:
    """What the command does with a report, on a GPU that is pretended."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in dict(is_available=True, device_count=2, set_device=None, empty_cache=None).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(command, "describe", lambda device, packages: {"GPU": f"number {device.index}"})

    @staticmethod
    def run(*argv: str, error: float = 0.0) -> int:
        def measure(args: argparse.Namespace, report: Report, device: torch.device) -> None:
            report.checks.append(Check("decode", error, 2e-3))

        return command.run(argparse.ArgumentParser(prog="python -m bench"), argv, measure)

    def test_a_table_and_a_file_with_the_same_figures(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--json", str(tmp_path / "out.json"), "--device", "1") == 0
        assert "GPU: number 1" in capsys.readouterr().out
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["machine"] == {"GPU": "number 1"} and found["checks"][0]["met"]

    def test_only_json_on_stdout_and_code_1_for_a_wrong_kernel(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--json", "-", error=1.0) == 1
        assert not json.loads(capsys.readouterr().out)["checks"][0]["met"]

    def test_a_gpu_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run("--device", "2") == 2
        assert capsys.readouterr().err == "--device 2: there are 2 GPUs, from 0\n"

    def test_a_part_without_memory_is_listed(self) -> None:
        def part() -> None:
            raise torch.cuda.OutOfMemoryError("tried 9 GiB\nmore words")

        report = Report()
        command.run_part(report, "extend", part)
        assert report.skipped == [("the rest of extend", "out of GPU memory: tried 9 GiB")]


class TestScenes:
    @pytest.mark.parametrize("pattern", scenes.PATTERNS)
    def test_rows_were_moved_as_the_pattern_says(self, pattern: str) -> None:
        lengths = [3000, 1, 130, 5000]
        scene = scenes.make_scene(lengths, CPU)
        slots, base = scene.slots.numpy(), scene.bases[pattern].numpy()
        assert len(set(slots.tolist())) == len(slots) == scene.keys == sum(lengths)
        assert not scene.rows[slots].isnan().any() and scene.rows[: slots.min()].isnan().all()
        assert scene.kv_indptr.tolist() == [0, *np.cumsum(lengths)]
        changes = 0
        for first, n in zip(scene.first_slots, lengths, strict=True):
            delta = np.arange(n) - base[slots[first : first + n]]
            assert np.abs(delta).max() <= scenes.FARTHEST
            changes += int((np.diff(delta) != 0).sum())
            jumps = (np.diff(slots[first : first + n]) != 1).sum()
            assert jumps <= n // scenes.RUN[0], "slots are consecutive within a run"
        if pattern == "δ = 0":
            assert changes == 0
        elif pattern == "δ per run":
            assert sum(lengths) // scenes.RUN[1] - 2 <= changes <= sum(lengths) // scenes.RUN[0]
        else:
            assert changes > 0.99 * (sum(lengths) - len(lengths) - 2)

    def test_work_is_counted_pair_by_pair(self) -> None:
        positions, heads = np.array([3, 10, 11]), 5
        pairs = sum(p + 1 for p in positions.tolist())
        assert scenes.causal_pairs(positions) == pairs == 27
        assert scenes.absorbed_flops(heads, pairs) == 2 * heads * pairs * (512 + 64 + 512)
        once = 2 * heads * 512 * (128 + 128) * 12
        assert scenes.expanded_flops(heads, pairs, 12) == 2 * heads * pairs * (128 + 64 + 128) + once

    def test_bytes_of_a_decode_step(self) -> None:
        assert scenes.decode_bytes(64, 16, 64 * 8192) == 64 * 8192 * (1152 + 8) + 64 * 16 * (576 + 512) * 2


class Stopwatch:
    """A timer that runs nothing and always says 100 us, or runs it once."""

    def __init__(self, runs: bool) -> None:
        self.runs = runs

    def median_us(self, run: Callable[[], Any]) -> float:
        if self.runs:
            run()
        return 100.0


@pytest.mark.interpreter
class TestOnTheInterpreter:
    def test_the_checks_pass(self) -> None:
        pytest.importorskip("triton")
        from irminsul_kernels.bench import attention

        report = Report()
        attention.check(report, CPU, lengths=(40, 1, 70, 33), head_counts=(2,))
        assert [c.name.split(",")[0] for c in report.checks] == ["decode", "extend", "extend"] * 2
        assert not report.failed, report.text()

    def test_decode_is_reported_case_by_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        from irminsul_kernels.bench import attention
        from irminsul_kernels.bench.timing import Ceilings

        monkeypatch.setattr(attention, "DECODE_CASES", ((16, 2, 128),))
        monkeypatch.setattr(attention, "BAR_CASE", (16, 2, 128))
        report = Report()
        attention.decode(report, Stopwatch(runs=False), Ceilings(4000.0, 700.0), CPU)
        names = [row.name for row in report.rows]
        assert names[:3] == [f"decode, {p}" for p in scenes.PATTERNS] and names[3] == "main kernel without rotation"
        assert names[4:] == [*(f"main kernel, {p}" for p in scenes.PATTERNS), "torch SDPA"], report.skipped
        rate = scenes.decode_bytes(2, 16, 256) / 100 / 1e3
        assert report.rows[0].rate == pytest.approx(rate) and report.rows[0].share == pytest.approx(rate / 4000)
        assert report.rows[4].note == "rotation costs +0.0%"
        assert [(b.value, b.verdict) for b in report.bars] == [(0.0, "met"), (pytest.approx(rate / 4000), "missed")]
        assert {what for what, _ in report.skipped} == {"FlashInfer", "FlashMLA", "vLLM, Triton", "SGLang, Triton"}

    def test_extend_is_reported_case_by_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        from irminsul_kernels.bench import attention
        from irminsul_kernels.bench.timing import Ceilings

        report = Report()
        monkeypatch.setattr(attention, "CONTEXT", 4096)
        attention.extend_part(report, Stopwatch(runs=False), Ceilings(4000.0, 700.0), CPU)
        assert report.skipped == []
        assert len(report.rows) == 3 + 1 + 3 + 3 * (3 + 1 + 3)
        (bar,) = report.bars
        assert bar.value == report.rows[1].share

    def test_the_small_kernels_run_and_are_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        from irminsul_kernels.bench import small
        from irminsul_kernels.bench.timing import Ceilings

        for name, value in dict(TOKENS=5, HIDDEN=96, INNER=64, BATCH=3, VOCAB=300).items():
            monkeypatch.setattr(small, name, value)
        report = Report()
        small.small(report, Stopwatch(runs=True), Ceilings(4000.0, 700.0), CPU)
        assert len(report.checks) == 5 and not report.failed, report.text()
        assert len(report.rows) == 8


class TestShippedConfigurations:
    """The kernels are launched by argument name with their files' own constants: both must add up to what they take."""

    def test_decode(self) -> None:
        pytest.importorskip("triton")
        from irminsul_kernels.bench import attention

        for heads in sorted({case[0] for case in attention.DECODE_CASES}):
            scene = scenes.make_scene([128], CPU)
            run = attention.DecodeRun(scene, *scene.queries(1, heads, scenes.RANK, scenes.ROPE))
            given = self.arguments(run.kernel_alone("δ = 0", rotate=False))
            assert given | run.config.constexprs.keys() == set(run.config.kernel.arg_names)
            assert run.config.unrotated

    @staticmethod
    def arguments(call: Callable[[], Any]) -> set[str]:
        """Names that a launch would be given."""
        (given,) = [c.cell_contents for c in call.__closure__ or () if isinstance(c.cell_contents, dict)]
        return set(given)
