"""The log: what a line holds, that no client can forge or flood it, and that ids in it name nobody."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend import logs
from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import ServerStartError
from irminsul_backend.logs import LINES, MAX_LINE_BYTES, LimitedHandler, LineFormatter, about

Log = tuple[logging.Logger, Callable[[], list[str]]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(form: str = "text", ids: str = "hashed", clock: Clock | None = None) -> Log:
    """A logger of its own and what it has written, line by line."""
    stream, logger = io.StringIO(), logging.Logger("irminsul_backend.engine")
    handler = LimitedHandler(stream, clock or Clock())
    handler.setFormatter(LineFormatter(form, ids, "irminsul_engine"))
    logger.addHandler(handler)
    return logger, lambda: stream.getvalue().splitlines()


class TestLines:
    def test_text(self) -> None:
        logger, lines = make(ids="plain")
        with about("k1", session_id="agent 7"):
            logger.warning("%d rows distrusted", 3)
        logger.error("alone")
        head = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
        assert re.fullmatch(
            head + r" WARNING irminsul_backend.engine \[request=k1 session=agent 7\]: 3 rows.*", lines()[0]
        )
        assert re.fullmatch(head + r" ERROR irminsul_backend.engine: alone", lines()[1])

    def test_json(self) -> None:
        logger, lines = make("json", "plain")
        try:
            raise ValueError("wrong\nlevel")
        except ValueError:
            with about("k1", "k2", session_id="s"):
                logger.exception("failed: %s", "α\n")
        line = json.loads(lines()[0])
        assert len(lines()) == 1
        assert line["message"] == "failed: α\n"
        assert line["exception"].endswith("ValueError: wrong\nlevel")
        wanted = {"level": "ERROR", "process": "irminsul_engine", "logger": "irminsul_backend.engine"}
        assert {**line, **wanted, "request": "k1,k2", "session": "s"} == line

    def test_the_context_ends_with_its_block_and_is_a_threads_own(self) -> None:
        logger, lines = make(ids="plain")
        with about("outer"):
            with about("inner"):
                pass
            thread = threading.Thread(target=logger.error, args=("elsewhere",))
            thread.start()
            thread.join()
            logger.error("here")
        assert lines()[0].endswith("engine: elsewhere")
        assert lines()[1].endswith("[request=outer]: here")

    @given(st.text(), st.text(), st.text(), st.sampled_from(["text", "json"]))
    def test_no_text_ends_or_forges_a_line(self, message: str, key: str, session: str, form: str) -> None:
        logger, lines = make(form, "plain")
        with about(key, session_id=session):
            logger.error("%s", message)
        (line,) = "\n".join(lines()).split("\n")
        assert "\x1b" not in line
        if form == "json":
            assert set(json.loads(line)) >= {"time", "level", "logger"}

    @pytest.mark.parametrize("form", ["text", "json"])
    @pytest.mark.parametrize("character", ["x", "\0", "€", '"', "\ud800", "\U0001f600"])
    def test_an_entry_is_limited_in_size(self, form: str, character: str) -> None:
        logger, lines = make(form, "plain")
        with about(*[character * 10_000] * 20, session_id=character * 10_000):
            logger.error("long %s", character * 1_000_000)
            try:
                raise ValueError(character * 1_000_000 + " the end")
            except ValueError:
                logger.exception("long %s", character * 1_000_000)
        entries = "\n".join(lines()).split("\n20")
        assert len(entries) == 2 or form == "json"
        assert all(len(entry.encode()) <= MAX_LINE_BYTES for entry in (entries if form == "text" else lines()))
        assert "characters)" in lines()[0]
        assert "the end" in lines()[-1]

    def test_a_traceback_cannot_pass_for_lines_of_the_log(self) -> None:
        logger, lines = make()
        try:
            raise ValueError("first\n2026-01-01T00:00:00.000Z ERROR forged: line")
        except ValueError:
            logger.exception("failed")
        assert len(lines()) > 3
        assert all(line.startswith("    ") for line in lines()[1:])


class TestIds:
    def test_hashes_name_nobody_and_are_the_same_everywhere_in_one_server(self) -> None:
        program = "from irminsul_backend.logs import hashed_id; print(hashed_id('agent-7/α'))"
        run = [sys.executable, "-c", program]
        hashes = {subprocess.run(run, capture_output=True, text=True, check=True).stdout for _ in range(2)}
        assert len(hashes) == 1
        assert re.fullmatch(r"[0-9a-f]{10}\n", hashes.pop())
        other = f"import subprocess; print(subprocess.check_output({run!r}, text=True), end='')"
        nested = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
        assert nested != hashes, "another server hashes with another key"

    def test_they_are_the_default(self) -> None:
        logger, lines = make(ids=ServerConfig().log_ids)
        with about("alice@example.org", session_id="alice"):
            logger.error("x")
        assert "alice" not in lines()[0]
        assert f"request={logs.hashed_id('alice@example.org')} session={logs.hashed_id('alice')}" in lines()[0]


class TestFloods:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def flooded(self, clock: Clock) -> Iterator[Log]:
        yield make(clock=clock)

    def test_what_one_statement_writes_too_often_is_counted(self, flooded: Any, clock: Clock) -> None:
        logger, lines = flooded
        for i in range(1215):
            if i == 1214:
                clock.now += 1.5
            logger.error("step %d failed", i)  # a statement is told by its place, whatever it says
        logger.error("another statement")
        assert len(lines()) == LINES + 3
        assert lines()[LINES].endswith("… 1,204 more like this, the last: step 1213 failed")
        assert lines()[LINES + 1].endswith("step 1214 failed")
        assert lines()[LINES + 2].endswith("another statement")

    def test_a_flood_that_goes_on_is_written_ever_more_rarely(self, flooded: Any, clock: Clock) -> None:
        logger, lines = flooded

        def fail(every_s: float) -> None:
            clock.now += every_s
            logger.error("failed")

        for _ in range(60 * 100):
            fail(every_s=0.01)
        assert len(lines()) < 10 * (LINES + 1)
        fail(every_s=100)
        before = len(lines())
        for _ in range(LINES):
            fail(every_s=1)
        assert len(lines()) == before + LINES, "after it, every line is written"

    def test_the_rest_is_told_although_nothing_follows(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logs, "LONGEST_WINDOW_S", 0.01)
        logger, lines = make(clock=clock)
        for _ in range(LINES + 5):
            logger.error("failed")
        while len(lines()) == LINES:
            threading.Event().wait(0.001)
        assert "5 more like this" in lines()[-1]

    def test_closing_tells_the_rest_and_keeps_no_frames_alive(self, flooded: Any) -> None:
        logger, lines = flooded

        class Big:
            alive = True

            def __del__(self) -> None:
                Big.alive = False

        def fail() -> None:
            big = Big()
            raise ValueError(str(big))

        for _ in range(LINES + 1):
            try:
                fail()
            except ValueError:
                logger.exception("failed")
        assert not Big.alive
        logger.handlers[0].close()
        assert "1 more like this" in lines()[-1]


@pytest.mark.parametrize(("name", "value"), [("log_format", "xml"), ("log_ids", ""), ("log_level", "LOUD")])
def test_settings_of_the_log_are_checked_by_name(name: str, value: str) -> None:
    with pytest.raises(ServerStartError, match=f"{name} is {value!r}; it must be one of"):
        ServerConfig(**{name: value}).check()
