"""`irminsul eval` prints its tables, writes the same figures as JSON and refuses what cannot work before it starts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from irminsul_backend.commands.main import main
from irminsul_backend.evaluation import rotation_error as rotation


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRMINSUL_THREADS", "1")


def test_needle(one_layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "needle.json"
    run = ["eval", "needle", "--model", str(one_layer), "--lengths", "256", "128", "--prompts", "2", "--seed", "5"]
    assert main([*run, "--preset", "grams", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert {name: found[name] for name in ("preset", "reuse", "prompts", "seed")} == {
        "preset": "grams",
        "reuse": "content",
        "prompts": 2,
        "seed": 5,
    }
    assert [row["length"] for row in found["lengths"]] == [128, 256]
    assert all(row[mode]["multi_hop"]["prompts"] == 2 for row in found["lengths"] for mode in ("off", "content"))
    printed = capsys.readouterr().out
    assert "single-hop %" in printed
    assert "first hop" in printed
    assert str(one_layer) not in path.read_text() + printed


def test_rotation(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rotation.json"
    monkeypatch.setattr(rotation, "measure", partial(rotation.measure, 64))
    assert main(["eval", "rotation", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["met"] is True
    printed = capsys.readouterr().out
    assert f"{found['ropes']['yarn']['on_load']['relative_l2']:.2e}" in printed
    assert "4.70e-03" in printed
    assert "bit for bit" in printed


@pytest.mark.parametrize("what", ["needle", "rotation"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "no" / "such.json", tmp_path):
        assert main(["eval", what, "--json", str(path)]) == 1
        assert f"{path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--lengths", "0"], ["--prompts", "-1"], ["--reuse", "some"], ["--preset", "x"]])
def test_bad_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "needle", *flags])
    assert flags[0] in capsys.readouterr().err
