"""What reuse saves in prefill work: FLOPs from a model's sizes, seconds and joules from two stated numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from irminsul_backend.analysis.results import PromptResult, ReplayResult
from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.hub.json_files import read_config

H200_BF16_DENSE_PEAK = 989e12
"""FLOP/s, NVIDIA's data sheet."""
ASSUMED_UTILISATION = 0.4
DEFAULT_FLOPS_PER_SECOND = H200_BF16_DENSE_PEAK * ASSUMED_UTILISATION
DEFAULT_WATTS = 700.0
"""The H200's board power limit."""

FORMULA = """\
prefill FLOPs of the token at position p = 2 W + 2 L H (qk_nope + qk_rope + v) (p + 1)
  W  weights a token passes through, without embedding and output head: over all L layers
     attention: queries (through q_lora_rank if set), kv_a, kv_b, output; then the MLP: 3 hidden intermediate in dense
     layers; router + 3 hidden moe_intermediate (experts per token + shared) in the others
  L  num_hidden_layers, H  num_attention_heads; saved = sum over reused tokens
seconds = FLOPs / {flops:.3g} per second, joules = seconds * {watts:g} W"""


@dataclass(frozen=True)
class ModelSize:
    """Sizes that decide the work of prefill; each field is config.json's of the same name."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int

    @property
    def active_weights(self) -> int:
        """W of the formula."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        attention = hidden * query if rank is None else rank * (hidden + query)
        attention += hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        attention += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        attention += heads * self.v_head_dim * hidden
        moe_layers = max(0, self.num_hidden_layers - self.first_k_dense_replace) if self.n_routed_experts else 0
        experts = self.num_experts_per_tok + self.n_shared_experts
        moe = hidden * self.n_routed_experts + 3 * hidden * self.moe_intermediate_size * experts
        dense = 3 * hidden * self.intermediate_size
        return self.num_hidden_layers * attention + moe_layers * moe + (self.num_hidden_layers - moe_layers) * dense

    def prefill_flops(self, start: int, end: int) -> int:
        """FLOPs of computing positions [start, end) after [0, start)."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        seen = (end * (end + 1) - start * (start + 1)) // 2
        return 2 * (end - start) * self.active_weights + 2 * self.num_hidden_layers * self.num_attention_heads * (
            width * seen
        )


SIZES: dict[str, ModelSize] = {
    "deepseek-v2-lite": ModelSize(2048, 27, 16, None, 512, 128, 64, 128, 10944, 1408, 64, 2, 6, 1),
    "deepseek-v3": ModelSize(7168, 61, 128, 1536, 512, 128, 64, 128, 18432, 2048, 256, 1, 8, 3),
    "kimi-k2": ModelSize(7168, 61, 64, 1536, 512, 128, 64, 128, 18432, 2048, 384, 1, 8, 1),
    "moonlight-16b-a3b": ModelSize(2048, 27, 16, None, 512, 128, 64, 128, 11264, 1408, 64, 2, 6, 1),
}
"""From the config.json that each model is published with."""
_OPTIONAL = {
    "moe_intermediate_size": 0,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "num_experts_per_tok": 0,
    "first_k_dense_replace": 0,
}


def load_size(source: str) -> ModelSize:
    """A name in `SIZES`, or a folder with a config.json; raises UnsupportedModelError naming file and field."""
    if source.lower() in SIZES:
        return SIZES[source.lower()]
    if not Path(source).is_dir():
        raise UnsupportedModelError(
            f"--model {source}: neither a model folder nor a known size; known are {', '.join(SIZES)}"
        )
    read = FieldReader(read_config(source))
    names = [f.name for f in fields(ModelSize) if f.name != "q_lora_rank"]
    sizes: dict[str, Any] = {name: read.integer(name, _OPTIONAL.get(name), at_least=0) for name in names}
    sizes["q_lora_rank"] = read.optional_integer("q_lora_rank", at_least=0)
    read.check(Path(source) / "config.json")
    return ModelSize(**sizes)


@dataclass(frozen=True)
class Estimate:
    """Prefill work of a replay: in all, and what each kind of reuse saves of it."""

    flops: int
    exact_flops: int
    """Saved by the exact prefix alone, as every engine can."""
    content_flops: int
    """Saved beyond it."""
    flops_per_second: float
    watts: float

    def seconds(self, flops: int) -> float:
        return flops / self.flops_per_second

    def joules(self, flops: int) -> float:
        return self.seconds(flops) * self.watts

    def as_dict(self) -> dict[str, float]:
        saved = self.exact_flops + self.content_flops
        return {
            "flops": self.flops,
            "exact_flops": self.exact_flops,
            "content_flops": self.content_flops,
            "saved_seconds": self.seconds(saved),
            "saved_joules": self.joules(saved),
            "flops_per_second": self.flops_per_second,
            "watts": self.watts,
        }


def estimate(
    result: ReplayResult,
    size: ModelSize,
    flops_per_second: float = DEFAULT_FLOPS_PER_SECOND,
    watts: float = DEFAULT_WATTS,
) -> Estimate:
    """Add up the formula over a replay. The output head is left out: it runs once a prompt, reuse or not."""
    whole = sum(size.prefill_flops(0, prompt.tokens) for prompt in result.prompts)
    exact = _saved(result.prompts, size, exact=True)
    return Estimate(whole, exact, _saved(result.prompts, size, exact=False), flops_per_second, watts)


def _saved(prompts: Iterable[PromptResult], size: ModelSize, *, exact: bool) -> int:
    return sum(
        size.prefill_flops(start, start + length)
        for prompt in prompts
        for start, length, _, is_exact in prompt.segments
        if is_exact == exact
    )
