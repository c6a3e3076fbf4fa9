"""Reading trace files of every form, and what is said about broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import TraceError, TraceSession, read_trace


def rows(sessions: list[TraceSession]) -> list[dict[str, Any]]:
    return [
        {"session_id": s.session_id, "source": "made here", "turns": [{"messages": list(t)} for t in s.turns]}
        for s in sessions
    ]


def encode(sessions: list[TraceSession]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(sessions)).encode()


@pytest.fixture
def sessions() -> list[TraceSession]:
    made = list(synthetic_sessions(3, turns=3, seed=5))
    odd = ({"role": "tool", "content": "line one\u2028still the same line", "name": "kept"},)
    return [*made, TraceSession("α/7", (odd,))]


class TestRead:
    def test_plain_gzip_and_zstd_read_alike(self, tmp_path: Path, sessions: list[TraceSession]) -> None:
        data = encode(sessions)
        long_window = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
        forms = {
            "t.jsonl": data,
            "t.jsonl.gz": gzip.compress(data),
            "t.jsonl.zst": zstandard.ZstdCompressor(compression_params=long_window).compress(data),
            "frames.jsonl.zst": zstandard.compress(data[:1000]) + zstandard.compress(data[1000:]),
        }
        for name, content in forms.items():
            (tmp_path / name).write_bytes(content)
            assert list(read_trace(tmp_path / name)) == sessions, name

    def test_blank_lines_are_skipped(self, tmp_path: Path, sessions: list[TraceSession]) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(encode(sessions).replace(b"\n", b"\n\n"))
        assert list(read_trace(path)) == sessions

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("{", "not JSON"),
            ("[1]", "not an object"),
            ('{"turns": []}', "session_id is empty or missing"),
            ('{"session_id": "a", "turns": []}', "at least one turn"),
            ('{"session_id": "a", "turns": [{}]}', "turn 0: messages must be"),
            ('{"session_id": "a", "turns": [{"messages": []}]}', "turn 0: messages must be"),
            ('{"session_id": "a", "turns": [{"messages": [{"role": "user"}]}]}', "message 0: content is None"),
            ('{"session_id": "a", "turns": [{"messages": [{"content": "x"}]}]}', "message 0: role is None"),
            ('{"session_id": "a", "turns": [{"messages": ["x"]}]}', "message 0: role is None"),
        ],
    )
    def test_a_broken_line_is_named(
        self, tmp_path: Path, sessions: list[TraceSession], line: str, problem: str
    ) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(encode(sessions[:1]) + line.encode() + b"\n")
        reader = read_trace(path)
        assert next(reader) == sessions[0]
        with pytest.raises(TraceError, match=f"line 2.*{problem}"):
            next(reader)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"none\.jsonl cannot be read: No such file"):
            list(read_trace(tmp_path / "none.jsonl"))

    @pytest.mark.parametrize("suffix", ["gz", "zst"])
    def test_cut_or_foreign_data(self, tmp_path: Path, sessions: list[TraceSession], suffix: str) -> None:
        data = encode(sessions)
        whole = gzip.compress(data) if suffix == "gz" else zstandard.ZstdCompressor().compress(data)
        cut = tmp_path / f"cut.jsonl.{suffix}"
        cut.write_bytes(whole[: len(whole) // 2])
        foreign = tmp_path / f"foreign.jsonl.{suffix}"
        foreign.write_bytes(b"not compressed at all")
        for path in (cut, foreign):
            with pytest.raises(TraceError, match=path.name):
                list(read_trace(path))

    def test_text_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(b'{"session_id": "\xff"}\n')
        with pytest.raises(TraceError, match="not UTF-8"):
            list(read_trace(path))


class TestSynthetic:
    def test_seeded_and_growing(self) -> None:
        first, again, other = (list(synthetic_sessions(4, turns=5, seed=s)) for s in (1, 1, 2))
        assert first == again
        assert first != other
        for session in first:
            assert len(session.turns) == 5
            for before, after in zip(session.turns, session.turns[1:], strict=False):
                assert after[: len(before)] == before
                assert [m["role"] for m in after[len(before) :]] == ["assistant", "tool"]

    def test_sessions_share_their_head_and_differ_after_it(self) -> None:
        a, b = synthetic_sessions(2, tools=3, documents=2)
        assert a.turns[0][:4] == b.turns[0][:4]
        assert a.turns[0][4:] != b.turns[0][4:]
        assert {m["role"] for m in a.turns[-1]} == {"system", "tool_schema", "doc", "user", "assistant", "tool"}
