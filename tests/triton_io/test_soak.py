"""The soak test's own judgement, and its short form against real servers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from irminsul_backend.benchmarks.soak import __main__ as command
from irminsul_backend.benchmarks.soak.desk import badly_refused
from irminsul_backend.benchmarks.soak.generated import KINDS, generate
from irminsul_backend.benchmarks.soak.harness import Row, Soak, share
from irminsul_backend.benchmarks.soak.serving import SEGFAULT
from irminsul_backend.benchmarks.soak.wire import Reply

SHORT_SCALE = 0.004


@pytest.fixture
def soak(tmp_path: Path) -> Soak:
    return Soak(SHORT_SCALE, Path("nowhere"), tmp_path)


class TestJudgement:
    """What counts as a missed bar."""

    @pytest.mark.parametrize(
        ("reply", "word"),
        [
            (Reply([], "", hung=True), "no answer"),
            (Reply([{"output_ids": [5]}], ""), "served"),
            (Reply([], "KeyError: 'sampling'"), "inside"),
            (Reply([], "boom\n\nAt:\n  /x/model.py(12): execute"), "inside"),
            (Reply([], "x" * 5000), "5,000 bytes"),
        ],
    )
    def test_a_bad_refusal_is_seen(self, reply: Reply, word: str) -> None:
        assert word in badly_refused(reply)

    def test_a_refusal_by_name_is_right(self) -> None:
        assert not badly_refused(Reply([], "max_tokens is 0; it must be at least 1"))

    def test_a_count_that_was_not_reached_is_said(self) -> None:
        assert share(10, 10) == "10"
        assert "3 of 10" in share(3, 10)

    @pytest.mark.parametrize(
        "line",
        [
            "[18713.9] triton_python_b[4711]: segfault at 60 ip 000055 sp 00007f error 4 in stub",
            "[1.0] traps: triton_python_b[4711] general protection fault ip:7f sp:7f error:0",
        ],
    )
    def test_faults_in_the_kernels_log_name_the_process(self, line: str) -> None:
        match = SEGFAULT.search(line)
        assert match and "4711" in match.groups()

    def test_a_check_that_breaks_is_a_missed_bar_and_the_next_one_runs(
        self, soak: Soak, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(soak: Soak) -> Iterator[Row]:
            yield Row("first", "bar", "seen", True)
            raise RuntimeError("no server")

        def fine(soak: Soak) -> Iterator[Row]:
            yield Row("second", "bar", "seen", True)

        monkeypatch.setattr(command, "CHECKS", {"broken": broken, "fine": fine})
        table = command.run(soak, ["broken", "fine"])
        assert [row.ok for row in table["broken"]] == [True, False]
        assert "no server" in table["broken"][-1].measured
        assert all(row.ok for row in table["fine"])


class TestGenerated:
    def test_equal_seeds_make_equal_requests_of_every_kind(self) -> None:
        one, other = random.Random(7), random.Random(7)
        requests = [generate(one) for _ in range(500)]
        assert requests == [generate(other) for _ in range(500)]
        assert len({request.kind for request in requests}) >= len(KINDS)


@pytest.mark.server
@pytest.mark.parametrize("name", ["malformed", "cancels"])
def test_the_short_form_meets_every_bar(name: str, soak: Soak) -> None:
    missed = [row for row in command.run(soak, [name])[name] if not row.ok]
    assert not missed
