"""``generate``, the client's command, against a small gRPC server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from irminsul_client.cli import main


class TestGenerateCommand:
    def test_text_on_stdout_usage_on_stderr(self, ensemble: Any, capsys: pytest.CaptureFixture[str]) -> None:
        for extra in ([], ["--stream"]):
            assert main(["generate", "hello there", "--url", ensemble.address, *extra]) == 0
            captured = capsys.readouterr()
            assert captured.out == "hello there \n"
            assert captured.err.startswith("prompt 9 = exact 2 + shifted 3 + computed 4 (1 segments); generated 2;")

    def test_session_stays_open_until_end(self, ensemble: Any) -> None:
        for extra in ([], [], ["--end"]):
            assert main(["generate", "hi", "--url", ensemble.address, "--session", "s", *extra]) == 0
        assert [(s.start, s.end) for s in ensemble.seen] == [
            (True, False),
            *[(True, False), (False, False)],
            *[(True, True), (False, True), (True, True)],
        ]

    def test_messages_file_and_json(self, ensemble: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "m.json"
        path.write_text('[{"role": "user", "content": "from a file"}]')
        assert main(["generate", "--messages", str(path), "--json", "--url", ensemble.address]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["text"] == "from a file "
        assert answer["usage"]["shifted_tokens"] == 3

    def test_bad_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "m.json"
        path.write_text("{}")
        assert main(["generate", "--messages", str(path)]) == 1
        assert "must be a JSON list" in capsys.readouterr().err
        assert main(["generate", "--messages", str(tmp_path / "none.json")]) == 1
        assert "none.json" in capsys.readouterr().err

    def test_unreachable(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["generate", "hi", "--url", "127.0.0.1:1"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
