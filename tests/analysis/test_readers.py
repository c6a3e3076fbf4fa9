"""Files in every form that is understood, mixed and broken ones: what is read, in which order, and what is reported."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from irminsul_traffic.scenarios import apply_scenario
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import TraceError

from irminsul_backend.analysis.readers import PromptLog, interleaved, read_log
from irminsul_backend.errors import InvalidRequestError

CHAT = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]}


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def trace_row(name: str, *turns: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "session_id": name,
        "turns": [{"messages": [{"role": role, "content": text} for role, text in turn]} for turn in turns],
    }


def prompts(log: PromptLog) -> list[tuple[str, list[tuple[str, str]]]]:
    """(session, [(role, text)]) in the order of the replay."""
    return [
        (log.sessions[s].session_id, [(m["role"], m["content"]) for m in log.sessions[s].turns[t]])
        for s, t in log.order
    ]


class TestTraces:
    @pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
    def test_plain_and_compressed(self, tmp_path: Path, suffix: str) -> None:
        text = json.dumps(trace_row("a", [("user", "x")], [("user", "x"), ("assistant", "y")])) + "\n"
        path = tmp_path / f"t.jsonl{suffix}"
        data = text.encode()
        path.write_bytes(
            {"": data, ".gz": gzip.compress(data), ".zst": zstandard.ZstdCompressor().compress(data)}[suffix]
        )
        log = read_log(path)
        assert prompts(log) == [("a", [("user", "x")]), ("a", [("user", "x"), ("assistant", "y")])]
        assert log.problems == []

    def test_eight_sessions_take_turns(self) -> None:
        order = list(interleaved([2] * 8 + [1, 3]))
        assert order[:8] == [(s, 0) for s in range(8)]
        assert order[8:16] == [(s, 1) for s in range(8)]
        assert order[16:] == [(8, 0), (9, 0), (9, 1), (9, 2)]
        assert list(interleaved([])) == []

    def test_equal_texts_are_held_once(self, tmp_path: Path) -> None:
        log = read_log(write(tmp_path / "t.jsonl", trace_row("a", [("user", "long text")], [("user", "long text")])))
        first, second = log.sessions[0].turns
        assert first[0]["content"] is second[0]["content"]


class TestRequestBodies:
    def test_openai_chat_with_tools_parts_and_calls(self, tmp_path: Path) -> None:
        tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
        body = {
            "model": "m",
            "session_id": "s1",
            "tools": [tool],
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
            ],
        }
        log = read_log(write(tmp_path / "log.jsonl", body))
        assert prompts(log) == [
            (
                "s1",
                [
                    ("system", "S"),
                    ("tool_schema", json.dumps(tool)),
                    ("user", "a\nb"),
                    ("assistant", '{"name": "find", "arguments": "{}"}'),
                    ("tool", "found"),
                ],
            )
        ]
        assert log.problems == []

    def test_anthropic(self, tmp_path: Path) -> None:
        tool = {"name": "find", "input_schema": {"type": "object"}}
        body = {
            "system": [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}],
            "metadata": {"user_id": "u7"},
            "tools": [tool],
            "messages": [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "looking"},
                        {"type": "tool_use", "id": "t", "name": "find", "input": {"q": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "result"}]},
                        {"type": "text", "text": "and now?"},
                    ],
                },
            ],
        }
        log = read_log(write(tmp_path / "log.jsonl", body))
        assert prompts(log) == [
            (
                "u7/guessed-1",
                [
                    ("system", "S1\nS2"),
                    ("tool_schema", json.dumps(tool)),
                    ("user", "go"),
                    ("assistant", 'looking\n{"name": "find", "input": {"q": 1}}'),
                    ("tool", "result"),
                    ("user", "and now?"),
                ],
            )
        ]

    def test_completions(self, tmp_path: Path) -> None:
        log = read_log(write(tmp_path / "log.jsonl", {"prompt": "one", "user": "u"}, {"prompt": ["two", "three"]}))
        assert [p[1] for p in prompts(log)] == [[("user", "one")], [("user", "two")], [("user", "three")]]

    @pytest.mark.parametrize(
        "where", ["session_id", "session", "conversation_id", "metadata.session_id", "body.session_id"]
    )
    def test_session_keys_and_the_order_of_the_file(self, tmp_path: Path, where: str) -> None:
        def row(key: str, text: str) -> dict[str, Any]:
            body = {"messages": [{"role": "user", "content": text}]}
            outer, _, inner = where.partition(".")
            if outer == "body":
                return {"custom_id": text, "body": {**body, inner: key}}
            return {**body, outer: {inner: key} if inner else key}

        path = write(tmp_path / "log.jsonl", row("a", "1"), row("b", "2"), row("a", "3"), row("a", "4"), row("b", "5"))
        found = prompts(read_log(path))
        assert [(name, parts[0][1]) for name, parts in found] == [*zip("abaab", "12345", strict=True)]

    @pytest.mark.parametrize("scenario", ["asis", "early", "prune", "reminder"])
    def test_sessions_without_a_key_are_told_apart(self, tmp_path: Path, scenario: str) -> None:
        sessions = list(apply_scenario(scenario, synthetic_sessions(3, turns=5)))
        rows = [{"messages": list(s.turns[t])} for t in range(5) for s in sessions]
        names = [name for name, _ in prompts(read_log(write(tmp_path / "log.jsonl", *rows)))]
        assert len(set(names)) == 3
        assert names == names[:3] * 5

    def test_a_user_has_sessions(self, tmp_path: Path) -> None:
        """Equal prompts of two users are two sessions, and what one user asks next to each other is told apart."""
        sessions = list(synthetic_sessions(2, turns=3))
        rows = [
            {"user": user, "messages": list(s.turns[t])} for t in range(3) for s in sessions for user in ("ann", "bob")
        ]
        names = [name for name, _ in prompts(read_log(write(tmp_path / "log.jsonl", *rows)))]
        assert names == ["ann/guessed-1", "bob/guessed-1", "ann/guessed-2", "bob/guessed-2"] * 3


class TestPlainText:
    def test_one_prompt_a_line(self, tmp_path: Path) -> None:
        path = write(tmp_path / "prompts.txt", "first prompt", "", "{not json", "second one")
        assert [p[1][0][1] for p in prompts(read_log(path))] == ["first prompt", "{not json", "second one"]

    def test_prompts_that_begin_or_end_alike_are_a_session(self, tmp_path: Path) -> None:
        tail = "the same long text " * 5
        path = write(tmp_path / "p.txt", f"at 10:05 {tail}", "something else entirely", f"at 10:06:11 {tail}")
        names = [name for name, _ in prompts(read_log(path))]
        assert names[0] == names[2] != names[1]


class TestProblems:
    def test_broken_lines_are_reported_by_number_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        bad_role = {"messages": [{"role": "narrator", "content": "x"}, {"role": "user", "content": "y"}]}
        image = {"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "z"}]}]}
        path = tmp_path / "mixed.jsonl"
        lines: list[Any] = [
            CHAT,
            "{broken",
            {"session_id": "e", "turns": []},
            [1, 2],
            {"foo": 1},
            {"messages": []},
            bad_role,
            image,
            {"prompt": [1, 2, 3]},
            {"messages": [{"role": "user", "content": 5}]},
            {"session_id": "m", "turns": [{"messages": [{"role": "user"}]}]},
            trace_row("ok", [("user", "from a trace")]),
            '{"prompt": "half \\ud800"}',
        ]
        write(path, *lines)
        path.write_bytes(path.read_bytes() + b'{"prompt": "\xff\xfe"}\n' + b'{"prompt": "last"}\n')
        log = read_log(path)
        texts = [parts[-1][1] for _, parts in prompts(log)]
        assert texts == ["from a trace", "hello", "y", "z", "last"]
        numbers = [int(problem.split("line ")[1].split(":")[0]) for problem in log.problems]
        assert numbers == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14]
        by_number = dict(zip(numbers, log.problems, strict=True))
        assert "not JSON" in by_number[2] and "at least one turn" in by_number[3]
        assert "'narrator'" in by_number[7] and "'image_url'" in by_number[8]
        assert "surrogate" in by_number[13] and "0xff" in by_number[14]

    def test_problems_hold_no_prompt_text(self, tmp_path: Path) -> None:
        secret = "zanzibar"
        rows: list[Any] = [
            CHAT,
            {"prompt": {"text": secret}},
            {"messages": [{"role": "user", "content": {"text": secret}}]},
            {"messages": [secret]},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "data": secret}, {"type": "text", "text": "x"}]}
                ]
            },
            {"session_id": "s", "turns": [{"messages": [{"role": "user", "content": [secret]}]}]},
            f'{{"prompt": "{secret}',
        ]
        log = read_log(write(tmp_path / "log.jsonl", *rows))
        assert len(log.problems) == 6
        assert secret not in "".join(log.problems)

    def test_damage_in_the_middle_keeps_what_came_before(self, tmp_path: Path) -> None:
        rows = [trace_row(f"s{i}", [("user", f"text {i} " * 200)]) for i in range(200)]
        data = gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode())
        path = tmp_path / "cut.jsonl.gz"
        path.write_bytes(data[: len(data) // 2])
        log = read_log(path)
        assert 0 < len(log.sessions) < 200
        assert len(log.problems) == 1 and "damaged" in log.problems[0]

    @pytest.mark.parametrize("text", ["", "\n\n", "a,b\n1,2\n", '{"x": 1}\n{"y": 2}\n', "[1, 2]\n"])
    def test_a_file_of_no_known_form_is_refused_with_what_was_expected(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "data.csv"
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match=r"data\.csv.*expected one JSON object a line"):
            read_log(path)

    def test_binary_and_missing_files(self, tmp_path: Path) -> None:
        path = tmp_path / "x.bin"
        path.write_bytes(bytes(range(256)) * 4)
        with pytest.raises(InvalidRequestError, match="expected"):
            read_log(path)
        with pytest.raises(TraceError, match="cannot be read"):
            read_log(tmp_path / "absent.jsonl")

    def test_deep_nesting(self, tmp_path: Path) -> None:
        log = read_log(write(tmp_path / "deep.jsonl", "[" * 100_000, CHAT))
        assert len(log.order) == 1 and "line 1" in log.problems[0]
