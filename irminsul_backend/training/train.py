"""Train the shipped model: `python -m irminsul_backend.training.train`.

Lessons are sessions full of questions (:mod:`irminsul_traffic.facts`); the loss is on the replies alone,
the only tokens that can be known. First few names, then all; single-hop questions, then multi-hop ones; whenever the
accuracy passes the bar, the next stage, with sessions of twice the length. Every lesson is new, so the accuracy shown
is on unseen prompts. Stop it at any time: it goes on where it was from the state file in the work folder.
"""

from __future__ import annotations

import argparse
import json
import pickle
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from irminsul_traffic.facts import NeedleMaker
from irminsul_traffic.words import THINGS
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.errors import IrminsulError
from irminsul_backend.model import ModelConfig, parse_config
from irminsul_backend.training.network import Network, initial_weights
from irminsul_backend.training.train_tokenizer import (
    BEGIN,
    END,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    save_tokenizer,
    train_tokenizer,
)

SEED = 20250501
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
SINGLE_BAR, MULTI_BAR = 0.95, 0.85
BATCH_TOKENS = 4096
MATRIX_LR, TABLE_LR = 0.02, 2e-3
"""Muon's for attention and dense matrices, AdamW's for everything else."""
BALANCE = 0.01
"""Weight of the routers' load balance against the replies' loss."""
SAVE_EVERY = 50


@dataclass(frozen=True)
class Stage:
    """Sessions of `length` tokens, of whose questions `multi_share` are multi-hop, for at most `steps` steps."""

    length: int
    multi_share: float
    steps: int
    names: int = len(THINGS)
    """The number of things, and of people, that facts are about."""
    decay: bool = False
    """Run to the end whatever the accuracy, while the learning rates fall to zero."""


STAGES = (
    Stage(128, 0.0, 300, names=8),
    Stage(128, 0.5, 500, names=8),
    Stage(128, 0.5, 500, names=16),
    Stage(128, 0.5, 500, names=32),
    Stage(128, 0.5, 800),
    Stage(256, 0.5, 1000),
    Stage(512, 0.5, 800),
    Stage(1024, 0.5, 600),
    Stage(2048, 0.5, 400),
    Stage(2048, 0.5, 300, decay=True),
)


@dataclass
class State:
    """Where the curriculum is; the accuracies are moving averages over the stage."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    single: float = 0.0
    multi: float = 0.0


class Trainer:
    """Weights, optimizers and the place in the curriculum; :meth:`step` moves all of them by one batch."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, device: str = "cpu", seed: int = SEED) -> None:
        self.tokenizer, self.device, self.seed = tokenizer, device, seed
        self.assistant, self.end = SPECIAL_TOKENS.index("<|assistant|>"), SPECIAL_TOKENS.index(END)
        self.weights = {k: v.to(device).requires_grad_() for k, v in initial_weights(config, seed).items()}
        self.network = Network(config, self.weights)
        tables = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
        matrices = [
            k for k, v in self.weights.items() if v.ndim == 2 and not k.endswith(tables) and ".experts." not in k
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon([self.weights[k] for k in matrices], lr=MATRIX_LR, weight_decay=0.0),
            torch.optim.AdamW(
                [v for k, v in self.weights.items() if k not in matrices],
                lr=TABLE_LR, betas=(0.9, 0.98), weight_decay=0.0,
            ),
        ]  # fmt: skip
        self.state = State()

    @property
    def stage(self) -> Stage | None:
        """None: the curriculum is through."""
        return STAGES[self.state.stage] if self.state.stage < len(STAGES) else None

    def lessons(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """This step's batch: token ids int64 [B, T]; the hops of each row's questions, int64 [B, most questions]."""
        maker = NeedleMaker(f"{self.seed}/{self.state.step}")
        made = [
            maker.lesson(int(0.9 * stage.length), stage.multi_share, stage.names)
            for _ in range(BATCH_TOKENS // stage.length)
        ]
        ids = torch.full((len(made), stage.length), self.end)
        hops = torch.zeros(len(made), max(len(asked) for _, asked in made), dtype=torch.int64)
        for row, (text, asked) in enumerate(made):
            kept = torch.tensor(self.tokenizer.encode(text).ids[: stage.length])
            ids[row, : len(kept)] = kept
            hops[row, : len(asked)] = torch.tensor(asked)
        return ids.to(self.device), hops.to(self.device)

    def replies(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the next token is of a reply, its end included: int64 [N] row, place, and which question of the row."""
        asked = (ids == self.assistant).cumsum(dim=1)
        ended = (ids == self.end).cumsum(dim=1)
        row, place = torch.nonzero((asked > ended)[:, :-1], as_tuple=True)
        return row, place, asked[row, place] - 1

    def step(self) -> float:
        """One batch; returns the replies' loss in nats and moves the state on."""
        stage, state = self.stage, self.state
        assert stage is not None, "the curriculum is through"
        scale = 1 - state.stage_step / stage.steps if stage.decay else min(1.0, (state.step + 1) / 20)
        for optimizer, rate in zip(self.optimizers, (MATRIX_LR, TABLE_LR), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        ids, hops = self.lessons(stage)
        row, place, question = self.replies(ids)
        targets = ids[row, place + 1]
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.network.logits(self.network.hidden(ids)[row, place])
        loss = F.cross_entropy(logits, targets)
        (loss + BALANCE * self.network.balance).backward()
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # a reply is right if all its tokens are
        wrong = torch.zeros_like(hops)
        wrong.index_put_((row, question), (logits.argmax(dim=-1) != targets).long(), accumulate=True)
        asked = torch.zeros_like(hops, dtype=torch.bool)
        asked[row, question] = True  # sessions are cut at their length
        self._advance(stage, wrong[asked] == 0, hops[asked])
        return loss.item()

    def _advance(self, stage: Stage, right: Tensor, kinds: Tensor) -> None:
        state = self.state
        for name, kind in (("single", 1), ("multi", 2)):
            if (kinds == kind).any():
                now = right[kinds == kind].float().mean().item()
                setattr(state, name, 0.9 * getattr(state, name) + 0.1 * now)
        state.step += 1
        state.stage_step += 1
        passed = state.single >= SINGLE_BAR and (stage.multi_share == 0 or state.multi >= MULTI_BAR)
        if state.stage_step >= stage.steps or (passed and not stage.decay):
            state.stage, state.stage_step, state.single, state.multi = state.stage + 1, 0, 0.0, 0.0

    def save(self, path: Path) -> None:
        """Write weights, optimizers and state; a crash meanwhile leaves the old file whole."""
        whole = {
            "state": asdict(self.state),
            "weights": {k: v.detach() for k, v in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(whole, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        """Take up a saved state. Raises IrminsulError if the file is no such state."""
        try:
            whole = torch.load(path, map_location=self.device, weights_only=True)
            self.state = State(**whole["state"])
        except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, TypeError) as error:
            raise IrminsulError(
                f"{path} is no state of a training run ({type(error).__name__}); --fresh begins anew"
            ) from error
        with torch.no_grad():
            for name, weight in whole["weights"].items():
                self.weights[name].copy_(weight)
        for optimizer, state in zip(self.optimizers, whole["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def train(trainer: Trainer, state_file: Path, console: Console, stop: threading.Event) -> bool:
    """Run the curriculum with a progress bar, the state saved every SAVE_EVERY steps and when `stop` is set.

    Returns True when it is through, False where `stop` ended it.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", shown="")
        shown = ""
        while (stage := trainer.stage) is not None:
            number = trainer.state.stage
            loss = trainer.step()
            state = trainer.state
            done = state.stage != number
            at = f"step {state.step}: {stage.length} tokens, stage {number + 1} of {len(STAGES)}"
            if not done:  # a new stage has no accuracy yet: the one before it stays
                shown = f"loss {loss:.2f}  single-hop {100 * state.single:.0f} %  multi-hop {100 * state.multi:.0f} %"
                progress.update(task, description=at, completed=state.stage_step, total=stage.steps, shown=shown)
            if done or stop.is_set() or state.step % SAVE_EVERY == 0:
                trainer.save(state_file)
                if done or not console.is_terminal:
                    end = " - done" if done else ""
                    console.print(f"{time.strftime('%H:%M:%S')} {at}, {shown}{end}", soft_wrap=True)
            if stop.is_set():
                return False
    return True


def write_model(folder: Path, tokenizer: Tokenizer, weights: dict[str, Tensor]) -> None:
    """Write the whole Hugging Face folder: weights in bfloat16, config, tokenizer, template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(tokenizer)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    tensors = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The shipped model's config.json."""
    return CONFIG | {"bos_token_id": tokenizer.token_to_id(BEGIN), "eos_token_id": tokenizer.token_to_id(END)}


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Train the shipped model on prompts made here; stopped at any time, it goes on where it was."
    )
    parser.add_argument("--out", type=Path, default=DEMO_MODEL, help="model folder to write (default: the shipped one)")
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="folder of the state file")
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0 = one per core)")
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run's state and its tokenizer")
    arguments = parser.parse_args()
    console = Console()
    try:
        return _run(arguments, console)
    except KeyboardInterrupt:
        return 130
    except (IrminsulError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.threads < 0:
        raise IrminsulError(f"--threads is {arguments.threads}; it must be at least 0 (0 = one per core)")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if arguments.device == "auto" else arguments.device
    if device != "cpu" and not (device == "cuda" and found == "cuda"):
        raise IrminsulError(f"--device is {device!r}; here it must be auto or {' or '.join(sorted({'cpu', found}))}")
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    state_file, tokenizer_file = arguments.work / "state.pt", arguments.work / "tokenizer.json"
    if arguments.fresh:
        state_file.unlink(missing_ok=True)
        tokenizer_file.unlink(missing_ok=True)
    if not tokenizer_file.exists():
        console.print("training the tokenizer (about half a minute)")
        train_tokenizer(SEED).save(str(tokenizer_file), pretty=False)
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing narrower
        raise IrminsulError(f"{tokenizer_file} is damaged ({error}); --fresh begins anew") from error
    trainer = Trainer(tokenizer, parse_config(model_config(tokenizer)), device)
    if state_file.exists():
        trainer.resume(state_file)
        console.print(f"going on at step {trainer.state.step} from {state_file}", soft_wrap=True)
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # a step is finished, so that what is saved is whole
    if not train(trainer, state_file, console, stop):
        console.print(f"stopped at step {trainer.state.step}; the same command goes on from there", soft_wrap=True)
        return 130
    write_model(arguments.out, tokenizer, trainer.weights)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    console.print(f"{arguments.out}: {sum(w.numel() for w in trainer.weights.values()):,} weights, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
