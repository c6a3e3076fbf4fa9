"""Generation ends at every id that the model's files give as the turn's end: from the files to the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.engine import Engine
from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.frontend.chunker import PromptPreparer
from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.text import Tokenizer

PROMPT = b"The agent reads the answer."
TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_config(ServerConfig(capacity_tokens=1024, threads=1))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model with no file that names an end."""
    for path in DEMO_MODEL.iterdir():
        if path.suffix == ".json":
            fields = json.loads(path.read_text(encoding="utf-8"))
            lean = {k: v for k, v in fields.items() if k not in ("eos_token_id", "eos_token")}
            (tmp_path / path.name).write_text(json.dumps(lean), encoding="utf-8")
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


@pytest.fixture
def generate(engine: Engine, folder: Path) -> Callable[..., tuple[list[int], str]]:
    """The same answer each time: token ids and finish reason. Requests are packed on their way, as when served."""

    def run(**fields: Any) -> tuple[list[int], str]:
        preparer = PromptPreparer(ServerConfig(model=str(folder)))
        sampling = {"temperature": 2.0, "seed": 1, "reuse": b"off", "max_tokens": TOKENS}
        got = preparer.prepare({"text_input": PROMPT, **sampling, **fields}, "s", start=True, end=True)
        events: list[Event] = []
        done = threading.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            if event.kind in ("finished", "error"):
                done.set()

        request = GenerationRequest.unpack(got.request.pack())
        engine.submit(request, got.token_ids, got.chunk_ends, got.fingerprints, on_event)
        assert done.wait(60)
        return [token for event in events for token in event.token_ids], events[-1].finish_reason

    return run


def first_seen(tokens: list[int]) -> list[int]:
    """Offsets at which a token occurs that did not occur before, the very first left out."""
    return [i for i, token in enumerate(tokens) if i and token not in tokens[:i]]


FILES = ("generation_config.json", "config.json")


@pytest.mark.parametrize("place", ["generation_config.json", "config.json", "tokenizer_config.json"])
def test_each_file_is_heard(generate: Callable[..., Any], folder: Path, place: str) -> None:
    whole, reason = generate()
    assert (len(whole), reason) == (TOKENS, "length")
    library = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    written = {i: text for text, i in library["model"]["vocab"].items()}
    written |= {token["id"]: token["content"] for token in library["added_tokens"]}
    at = first_seen(whole)[-1]
    if place == "tokenizer_config.json":
        change(folder / place, eos_token={"content": written[whole[at]]})
    else:
        change(folder / place, eos_token_id=whole[at])
    assert generate() == (whole[:at], "stop")
    assert generate(ignore_eos=True) == (whole, "length")


def test_every_id_of_a_list_ends_it(generate: Callable[..., Any], folder: Path) -> None:
    whole, _ = generate()
    unused = min(set(range(3, 40)) - set(whole))
    for at in first_seen(whole)[-3:]:
        for ids in ([unused, whole[at]], [whole[at], unused], [unused, whole[at], whole[at]]):
            change(folder / "generation_config.json", eos_token_id=ids)
            assert generate() == (whole[:at], "stop")


def test_files_add_up(generate: Callable[..., Any], folder: Path) -> None:
    """A base model's end in config.json and a chat model's in generation_config.json both end the turn."""
    whole, _ = generate()
    early, late = first_seen(whole)[0], first_seen(whole)[-1]
    for first, second in (FILES, FILES[::-1]):
        change(folder / first, eos_token_id=[whole[late]])
        change(folder / second, eos_token_id=whole[early])
        assert generate() == (whole[:early], "stop")


@pytest.mark.parametrize("value", ["</s>", True, -1, 1.5, [1, None], {"a": 1}])
@pytest.mark.parametrize("place", FILES)
def test_a_value_that_is_no_id_is_refused(folder: Path, place: str, value: Any) -> None:
    change(folder / place, eos_token_id=value)
    with pytest.raises(UnsupportedModelError, match=rf"eos_token_id in .*{place} is .*must be an id, a list of ids"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("value", [None, []])
def test_no_end_at_all(folder: Path, value: Any) -> None:
    for place in FILES:
        change(folder / place, eos_token_id=value)
    assert Tokenizer.load(folder).end_ids == ()
