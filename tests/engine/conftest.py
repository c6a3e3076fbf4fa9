"""Engines over small random models with rows of the real size; unused rows are NaN, integrity is checked at the end."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.engine import Engine
from irminsul_backend.model import MLAModel, load_model, parse_config
from irminsul_backend.model.random_weights import random_weights
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.request_spec import SamplingParams
from irminsul_backend.training.train import CONFIG

VOCAB = 512
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


@dataclass
class Result:
    tokens: list[int]
    log_probs: list[float]
    usage: Usage
    finish_reason: str
    events: list[Event]


@dataclass
class Pending:
    key: str
    events: list[Event] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        if event.kind in ("finished", "error"):
            self.done.set()

    def result(self) -> Result:
        assert self.done.wait(60), f"request {self.key} did not end"
        last = self.events[-1]
        assert [e.index for e in self.events] == list(range(len(self.events)))
        assert not last.error, last.error
        assert last.usage is not None
        usage = last.usage
        assert usage.exact_tokens + usage.shifted_tokens + usage.computed_tokens == usage.prompt_tokens
        tokens = [t for e in self.events for t in e.token_ids]
        return Result(tokens, [p for e in self.events for p in e.log_probs], usage, last.finish_reason, self.events)


class Harness:
    """Submits prompts the way the chunker would and collects what comes back.

    A prompt is token ids, or a list of parts (messages) whose edges are cuts.
    """

    def __init__(self, model: MLAModel, capacity: int, preset: str, **settings: Any) -> None:
        self.preset = PRESETS[preset]
        self.engine = Engine(model, capacity, self.preset, **settings)
        self.engine.runner.rows.fill_(float("nan"))
        self._keys = itertools.count()

    def submit(
        self,
        ids: Any,
        reuse: str = "content",
        *,
        max_tokens: int = 4,
        salt: str = "",
        session: str = "",
        fingerprints: np.ndarray | None = None,
        on_event: Callable[[Event], None] | None = None,
        **fields: Any,
    ) -> Pending:
        parts = ids if isinstance(ids, list) and isinstance(ids[0], np.ndarray) else [np.asarray(ids, np.int32)]
        ids = np.concatenate(parts).astype(np.int32)
        edges = np.cumsum([0, *map(len, parts[:-1])]).astype(np.int32)
        ends = cut(ids, self.preset, edges if self.preset.structure_cuts else None)
        namespace = json.dumps(["salt", salt])
        prints = (
            fingerprint(ids, ends, namespace, self.preset.gram) if fingerprints is None else fingerprints[: len(ends)]
        )
        sampling = fields.pop("sampling", {})
        pending = Pending(f"request-{next(self._keys)}")
        request = GenerationRequest(
            key=pending.key,
            session_id=session or pending.key,
            namespace=namespace,
            reuse=reuse,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            return_log_probs=True,
            **fields,
        )
        self.engine.submit(request, ids, ends, prints, on_event or pending.on_event)
        return pending

    def run(self, ids: Any, reuse: str = "content", **fields: Any) -> Result:
        return self.submit(ids, reuse, **fields).result()

    def same_as_off(self, result: Result, ids: Any, *, tolerance: float = 2e-4, **fields: Any) -> None:
        """The output equals a full prefill's: tokens, and log-probabilities within rounding."""
        off = self.run(ids, "off", **fields)
        assert off.usage.computed_tokens == off.usage.prompt_tokens
        assert result.tokens == off.tokens
        np.testing.assert_allclose(result.log_probs, off.log_probs, atol=tolerance)

    def status(self) -> dict[str, Any]:
        return self.engine.status()


def build_model(folder: Path, layers: int, **changes: Any) -> MLAModel:
    values = CONFIG | {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "first_k_dense_replace": min(1, layers - 1),
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(random_weights(parse_config(values), seed=7), folder / "model.safetensors")
    return load_model(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MLAModel]:
    """`one`: a row depends on its own token only, so any reuse must be right to rounding; `yarn`: the same under YaRN;
    `deep`: rows depend on their context."""
    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": build_model(folder / "one", 1),
        "yarn": build_model(folder / "yarn", 1, rope_scaling=YARN),
        "deep": build_model(folder / "deep", 3),
    }


@pytest.fixture
def harness(models: dict[str, MLAModel]) -> Iterator[Callable[..., Harness]]:
    """Make started engines; at the end each is checked for integrity, leaked references and leaked requests."""
    made: list[Harness] = []

    def make(model: str = "one", capacity: int = 16384, preset: str = "default", **settings: Any) -> Harness:
        made.append(Harness(models[model], capacity, preset, **settings))
        made[-1].engine.start()
        return made[-1]

    yield make
    for one in made:
        status = one.status()
        one.engine.close()
        assert status["integrity"] == "ok"
        assert status["running"] == status["waiting"] == status["cache"]["running"] == 0
        one.engine.cache.clear()
        assert one.engine.cache.pool.num_free == one.engine.cache.pool.capacity
        assert len(one.engine.cache.registry) == 0


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261129)


@pytest.fixture
def text(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """n random token ids (never the end id)."""
    return lambda n: rng.integers(2, VOCAB, n).astype(np.int32)
