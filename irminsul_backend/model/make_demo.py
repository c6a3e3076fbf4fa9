"""Make the demo model: `python -m irminsul_backend.model.make_demo [--out DIR] [--keep-tokenizer]`.

DeepSeek-V2 architecture in miniature with rows of real size (512 + 64), mixture-of-experts layers included, and random
weights: its text is nonsense. It exists so that everything runs at once on a laptop. The weights are scaled so that it
behaves like a model where a cache can tell the difference:

- attention scores have a standard deviation of about 2, so far tokens with a matching key weigh in;
- lower blocks add little to the residual stream, so rows above layer 0 depend on their context, but mostly on their own
  token (c_KV moves by 5 to 8 % when a quarter of the context is replaced by random tokens);
- the last layer's attention is strong, so the next token depends on far context (half of them change in that case);
- head rows of special tokens and of single bytes beyond ASCII are zero, so greedy text is printable and never ends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.model.config import ModelConfig
from irminsul_backend.training.tokenizer import BEGIN, END, VOCAB_SIZE, save_tokenizer, train_tokenizer
from irminsul_backend.model.weights import expected_shapes

SEED = 20250501
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
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
GAINS = {
    "embed_tokens": 1.0,
    "q_proj": 2.0,
    "o_proj": 0.3,
    "down_proj": 0.4,
    "lm_head": 2.5,
}
"""Standard deviation of each matrix's output for unit input; 1 where not named. Embedding: of its entries."""
LAST_ATTENTION_GAIN = 2.0
"""o_proj of the last layer: an average over many values is small, and this makes up for it."""


def random_weights(config: ModelConfig, silent_ids: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 tensors by published name; the same for the same seed, within a rounding between processors."""
    generator = torch.Generator().manual_seed(seed)
    last = f"model.layers.{config.num_layers - 1}.self_attn.o_proj"
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        kind = name.split(".")[-2]
        gain = LAST_ATTENTION_GAIN if name.startswith(last) else GAINS.get(kind, 1.0)
        std = gain if kind == "embed_tokens" else gain * shape[1] ** -0.5
        weights[name] = (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)
    weights["lm_head.weight"][list(silent_ids)] = 0
    return weights


def silent_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids that must not be generated: special tokens and tokens that are no whole text, or a control character."""
    return [
        token
        for token in range(tokenizer.get_vocab_size())
        if not (text := tokenizer.decode([token])) or not text.replace("\n", " ").replace("\t", " ").isprintable()
        or "\ufffd" in text
    ]  # fmt: skip


def make_demo(folder: Path, seed: int = SEED, tokenizer: Tokenizer | None = None) -> None:
    """Write a whole model folder; with `tokenizer` given, that one is used instead of training a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        print("training the tokenizer (about half a minute)")
        tokenizer = train_tokenizer(seed)
    ids = {"bos_token_id": tokenizer.token_to_id(BEGIN), "eos_token_id": tokenizer.token_to_id(END)}
    config = CONFIG | ids
    save_tokenizer(tokenizer, folder, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    print("drawing the weights")
    weights = random_weights(ModelConfig.from_dict(config), silent_ids(tokenizer), seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {sum(w.numel() for w in weights.values()):,} weights, {size / 1e6:.1f} MB in all")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model (random weights, fixed seed).")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL, help="folder to write (default: the shipped one)")
    parser.add_argument("--keep-tokenizer", action="store_true", help="use the tokenizer.json that is there already")
    arguments = parser.parse_args()
    path = arguments.out / "tokenizer.json"
    make_demo(arguments.out, tokenizer=Tokenizer.from_file(str(path)) if arguments.keep_tokenizer else None)


if __name__ == "__main__":
    main()
