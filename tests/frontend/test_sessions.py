"""Who may continue a session, what it remembers, and that it stays within its bounds."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from irminsul_backend.errors import SessionError
from irminsul_backend.frontend.sessions import CutPrompt, SessionTable


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def prompt(n: int = 10) -> CutPrompt:
    ids = np.arange(n, dtype=np.int32)
    return CutPrompt(ids, ids[:0], np.array([n], np.int32))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SessionTable:
    return SessionTable(600.0, clock)


class TestFlags:
    def test_start_then_turns_then_end(self, table: SessionTable) -> None:
        assert table.enter("a", start=True, end=False).previous is None
        first = prompt()
        table.remember("a", first)
        assert table.enter("a", start=False, end=False).previous is first
        assert table.enter("a", start=False, end=True).previous is first
        assert len(table) == 0
        with pytest.raises(SessionError, match="session 'a' is unknown or expired"):
            table.enter("a", start=False, end=False)

    def test_no_start_on_an_unknown_session(self, table: SessionTable) -> None:
        with pytest.raises(SessionError) as error:
            table.enter("who", start=False, end=False)
        assert str(error.value) == (
            "session 'who' is unknown or expired (idle limit 600 s); send the request again with the START flag"
        )

    def test_a_second_start_changes_nothing(self, table: SessionTable, clock: Clock) -> None:
        table.enter("a", start=True, end=False)
        table.remember("a", prompt())
        clock.now += 12.34
        with pytest.raises(SessionError) as error:
            table.enter("a", start=True, end=False)
        assert str(error.value) == (
            "session 'a' is already open (last used 12.3 s ago, idle limit 600 s); "
            "send the request without the START flag, or end the session first"
        )
        assert table.enter("a", start=False, end=False).previous is not None

    def test_one_shot_leaves_nothing(self, table: SessionTable) -> None:
        table.enter("a", start=True, end=True)
        table.remember("a", prompt())
        assert (len(table), table.prompt_bytes) == (0, 0)

    def test_end_closes_even_with_a_refused_start(self, table: SessionTable) -> None:
        """Triton has closed its sequence too; else the id would be refused until the idle limit."""
        table.enter("a", start=True, end=False)
        with pytest.raises(SessionError):
            table.enter("a", start=True, end=True)
        table.enter("a", start=True, end=False)


class TestExpiry:
    def test_idle_sessions_are_forgotten(self, table: SessionTable, clock: Clock) -> None:
        for name in "abc":
            table.enter(name, start=True, end=False)
            table.remember(name, prompt())
        clock.now += 600.0
        table.enter("b", start=False, end=False)
        clock.now += 0.5
        with pytest.raises(SessionError, match="'a' is unknown or expired"):
            table.enter("a", start=False, end=False)
        assert len(table) == 1
        assert table.prompt_bytes == prompt().nbytes

    def test_an_expired_session_starts_afresh(self, table: SessionTable, clock: Clock) -> None:
        table.enter("a", start=True, end=False)
        table.remember("a", prompt())
        clock.now += 601
        assert table.enter("a", start=True, end=False).previous is None

    def test_use_keeps_a_session(self, table: SessionTable, clock: Clock) -> None:
        table.enter("a", start=True, end=False)
        for _ in range(5):
            clock.now += 599
            table.enter("a", start=False, end=False)


class TestOpenings:
    def test_the_turns_of_a_session_share_one(self, table: SessionTable) -> None:
        opening = table.enter("a", start=True, end=False).opening
        assert table.enter("a", start=False, end=True).opening == opening

    def test_whoever_opens_the_id_next_gets_another(self, table: SessionTable, clock: Clock) -> None:
        openings = {table.enter("a", start=True, end=True).opening}
        openings.add(table.enter("a", start=True, end=False).opening)
        clock.now += 601
        openings.add(table.enter("a", start=True, end=False).opening)
        assert len(openings) == 3

    def test_a_request_without_a_session_has_its_own(self, table: SessionTable) -> None:
        one, other = (table.enter(None, start, end=False) for start in (False, True))
        assert one.opening != other.opening
        assert one.session_key != other.session_key
        table.remember(None, prompt())
        assert (len(table), table.prompt_bytes) == (0, 0)


class TestIds:
    def test_a_number_and_its_digits_are_two_sessions(self, table: SessionTable) -> None:
        number = table.enter(77, start=True, end=False)
        text = table.enter("77", start=True, end=False)
        assert number.session_key != text.session_key
        table.remember(77, prompt())
        assert table.enter("77", start=False, end=True).previous is None
        assert table.enter(77, start=False, end=True).previous is not None

    @pytest.mark.parametrize("name", ["agent-7/α", "0", "18446744073709551616", "x" * 128, "α" * 64])
    def test_allowed(self, table: SessionTable, name: str) -> None:
        table.enter(name, start=True, end=False)
        table.enter(name, start=False, end=True)

    @pytest.mark.parametrize(("name", "size"), [("x" * 129, 129), ("α" * 65, 130), ("y" * 10_000, 10_000)])
    def test_too_long(self, table: SessionTable, name: str, size: int) -> None:
        with pytest.raises(
            SessionError, match=f"the session id is {size} bytes long, at most 128 are allowed"
        ) as error:
            table.enter(name, start=True, end=False)
        assert len(str(error.value)) < 200
        assert len(table) == 0

    def test_empty(self, table: SessionTable) -> None:
        with pytest.raises(SessionError, match="the session id is empty"):
            table.enter("", start=True, end=False)


class TestBounds:
    def test_prompts_of_the_longest_idle_go_first(self, clock: Clock) -> None:
        table = SessionTable(600.0, clock, max_prompt_bytes=3 * prompt().nbytes)
        for name in "abcd":
            table.enter(name, start=True, end=False)
            table.remember(name, prompt())
        assert table.prompt_bytes == 3 * prompt().nbytes
        assert table.enter("a", start=False, end=False).previous is None
        assert table.enter("b", start=False, end=False).previous is not None

    def test_a_prompt_over_the_bound_is_not_kept(self, clock: Clock) -> None:
        table = SessionTable(600.0, clock, max_prompt_bytes=100)
        table.enter("a", start=True, end=False)
        table.remember("a", prompt(1000))
        assert table.enter("a", start=False, end=False).previous is None

    def test_the_longest_idle_session_makes_room(self, clock: Clock) -> None:
        table = SessionTable(600.0, clock, max_sessions=2)
        for name in "abc":
            table.enter(name, start=True, end=False)
        assert len(table) == 2
        with pytest.raises(SessionError, match="unknown or expired"):
            table.enter("a", start=False, end=False)

    def test_many_threads(self, table: SessionTable) -> None:
        def work(seed: int) -> None:
            for i in range(300):
                name = f"{seed}-{i % 3}"
                table.enter(name, start=True, end=False)
                table.remember(name, prompt())
                table.enter(name, start=False, end=True)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(table), table.prompt_bytes) == (0, 0)


class AgainstModel(RuleBasedStateMachine):
    """Any history of requests: the table agrees with a plain dictionary and its byte count is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = SessionTable(10.0, self.clock)
        self.open: dict[str, tuple[float, CutPrompt | None]] = {}

    @rule(name=st.sampled_from("abc"), start=st.booleans(), end=st.booleans(), size=st.integers(0, 50))
    def request(self, name: str, start: bool, end: bool, size: int) -> None:
        self.open = {n: s for n, s in self.open.items() if self.clock.now - s[0] <= 10.0}
        allowed = start != (name in self.open)
        try:
            got = self.table.enter(name, start, end).previous
            assert allowed
            assert got is (None if start else self.open[name][1])
            kept = prompt(size) if size else got
            if size:
                assert kept is not None
                self.table.remember(name, kept)
            self.open[name] = (self.clock.now, kept)
        except SessionError:
            assert not allowed
        if end:
            self.open.pop(name, None)

    @rule(seconds=st.floats(0, 11))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def bytes_are_exact(self) -> None:
        live = [s for s in self.table._sessions.values() if s.prompt is not None]
        assert self.table.prompt_bytes == sum(s.prompt.nbytes for s in live if s.prompt)
        assert set(self.open) <= set(self.table._sessions)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
