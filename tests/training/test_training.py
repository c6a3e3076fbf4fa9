"""The trainable network is the served architecture, and a run that was cut goes on as if it had not been."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.errors import IrminsulError
from irminsul_backend.model import load_model, parse_config
from irminsul_backend.training import train
from irminsul_backend.training.network import OFFSETS, Network, initial_weights
from irminsul_backend.training.train import CONFIG, Stage, Trainer

SMALL = CONFIG | {
    "hidden_size": 64, "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(autouse=True)
def short_curriculum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 256)
    monkeypatch.setattr(train, "STAGES", (Stage(128, 0.0, 2), Stage(128, 0.5, 2, decay=True)))


@pytest.mark.parametrize("length", [1, 70, 600])
def test_the_trained_network_is_the_served_model(length: int, tmp_path: Path) -> None:
    """600: the fused attention that long sequences train with."""
    config = parse_config(SMALL)
    weights = initial_weights(config, 3)
    for name, weight in weights.items():
        if weight.ndim == 1:  # norms begin as ones, which would hide one that is left out
            weights[name] = 1 + 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    save_file(weights, tmp_path / "model.safetensors")
    ids = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    network = Network(config, weights)
    trained = network.logits(network.hidden(ids))
    served = load_model(tmp_path)
    for row in range(2):
        torch.testing.assert_close(trained[row], served.logits(ids[row]), atol=1e-4, rtol=0)


def test_the_first_layer_begins_by_looking_back() -> None:
    """Each head at its own place."""
    config = parse_config(CONFIG)
    weights = initial_weights(config, 1)
    seen: list[torch.Tensor] = []
    network = Network(config, weights)
    original = torch.Tensor.softmax

    def spy(scores: torch.Tensor, dim: int) -> torch.Tensor:
        out = original(scores, dim=dim)
        if scores.ndim == 4 and not seen:
            seen.append(out)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", spy)
        network.hidden(torch.randint(0, config.vocab_size, (1, 100), generator=torch.Generator().manual_seed(2)))
    for head in range(config.num_heads):
        assert seen[0][0, head].diagonal(-OFFSETS[head])[10:].mean() > 0.7


def test_an_interrupted_run_ends_like_an_uninterrupted_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = parse_config(SMALL)
    whole, first = Trainer(tokenizer, config), Trainer(tokenizer, config)
    for _ in range(4):
        whole.step()
    for _ in range(3):
        first.step()
    first.save(tmp_path / "state.pt")
    second = Trainer(tokenizer, config)
    second.resume(tmp_path / "state.pt")
    assert second.state == first.state
    second.step()
    assert second.stage is whole.stage is None
    for name, weight in whole.weights.items():
        torch.testing.assert_close(second.weights[name], weight, msg=name)


def test_replies_are_what_the_lesson_says(tokenizer: Tokenizer) -> None:
    """One hop: a word and the end. Two hops: bridge, colon, word, end."""
    trainer = Trainer(tokenizer, parse_config(SMALL))
    ids, hops = trainer.lessons(Stage(256, 0.5, 1))
    row, place, question = trainer.replies(ids)
    colon = tokenizer.encode(":").ids
    checked = {1: 0, 2: 0}
    for i in range(len(ids)):
        text = tokenizer.decode(ids[i].tolist(), skip_special_tokens=False)
        for number, reply in enumerate(re.findall(r"<\|assistant\|>([^<]*)<\|end\|>", text)):
            targets = ids[i, place[(row == i) & (question == number)] + 1].tolist()
            assert tokenizer.decode(targets, skip_special_tokens=False) == reply + "<|end|>"
            assert len(targets) == (2 if hops[i, number] == 1 else 4)
            assert (colon[0] in targets) == (hops[i, number] == 2)
            checked[int(hops[i, number])] += 1
    assert min(checked.values()) > 0


def test_steps_lower_the_loss(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "STAGES", (Stage(128, 0.0, 100),))
    trainer = Trainer(tokenizer, parse_config(SMALL))
    losses = [trainer.step() for _ in range(25)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_stopping_saves_after_the_step(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config, stop = parse_config(SMALL), threading.Event()
    trainer, state_file = Trainer(tokenizer, config), tmp_path / "state.pt"
    stop.set()
    assert not train.train(trainer, state_file, Console(quiet=True), stop)
    assert trainer.state.step == 1
    again = Trainer(tokenizer, config)
    again.resume(state_file)
    assert again.state == trainer.state
    stop.clear()
    assert train.train(again, state_file, Console(quiet=True), stop)


@pytest.mark.parametrize("damage", [b"", b"x", b"PK\x03\x04"])
def test_a_damaged_state_is_refused_by_name(tokenizer: Tokenizer, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(damage)
    with pytest.raises(IrminsulError, match=r"state\.pt is no state"):
        Trainer(tokenizer, parse_config(SMALL)).resume(tmp_path / "state.pt")
