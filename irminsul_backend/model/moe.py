"""Feed-forward blocks: the gated MLP, the expert router, and the mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from irminsul_backend.model.config import ModelConfig
from irminsul_backend.model.weights import Checkpoint, Read


def _gate_up(read: Read, prefix: str) -> torch.Tensor:
    """gate_proj and up_proj as one matrix [2 * inner, hidden]: one product instead of two."""
    return torch.cat((read(f"{prefix}.gate_proj.weight"), read(f"{prefix}.up_proj.weight")))


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class MLP:
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, read: Read, prefix: str) -> None:
        self.gate_up = _gate_up(read, prefix)
        self.down = read(f"{prefix}.down_proj.weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return F.linear(_gated(F.linear(x, self.gate_up)), self.down)


class Router:
    """Chooses num_experts_per_tok experts for each token, in float32.

    Three published methods (`topk_method`):

    - ``greedy``: the best of softmax scores (DeepSeek-V2-Lite).
    - ``group_limited_greedy``: the same inside the topk_group groups whose best score is highest (DeepSeek-V2).
    - ``noaux_tc``: sigmoid scores; groups are ranked by the sum of their two best biased scores, experts by biased
      score; the weights are the scores without the bias (DeepSeek-V3).

    Weights are then normalised (`norm_topk_prob`) and scaled (`routed_scaling_factor`). As in the published DeepSeek-V2
    code, softmax weights are either normalised or scaled, never both; sigmoid weights can be both. (`transformers`
    ignores norm_topk_prob for DeepSeek-V2; every published V2 checkpoint has it off, where both agree.)
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        self.top_k = config.num_experts_per_tok
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.sigmoid = config.topk_method == "noaux_tc"
        self.normalise = config.norm_topk_prob
        self.scale = config.routed_scaling_factor if self.sigmoid or not self.normalise else 1.0
        self.weight = checkpoint.read_float32(f"{prefix}.weight")
        self.bias = checkpoint.read_float32(f"{prefix}.e_score_correction_bias") if self.sigmoid else None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> expert ids int64 [T, k], weights float32 [T, k]"""
        logits = F.linear(x.float(), self.weight)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)
        choice = scores if self.bias is None else scores + self.bias
        if self.kept_groups < self.groups:
            choice = self._mask_groups(choice)
        experts = choice.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale

    def _mask_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.view(choice.shape[0], self.groups, -1)
        ranks = grouped.topk(2, dim=-1).values.sum(dim=-1) if self.sigmoid else grouped.amax(dim=-1)
        kept = torch.zeros_like(ranks, dtype=torch.bool)
        kept.scatter_(1, ranks.topk(self.kept_groups, dim=-1, sorted=False).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(choice)


class MoE:
    """Routed experts, weighted, plus shared experts that see every token."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str) -> None:
        read = checkpoint.read
        self.router = Router(config, checkpoint, f"{prefix}.gate")
        self.shared = MLP(read, f"{prefix}.shared_experts") if config.n_shared_experts else None
        count, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        device, dtype = checkpoint.device, checkpoint.dtype
        self.gate_up = torch.empty(count, 2 * inner, hidden, device=device, dtype=dtype)
        self.down = torch.empty(count, hidden, inner, device=device, dtype=dtype)
        for expert in range(count):
            self.gate_up[expert] = _gate_up(read, f"{prefix}.experts.{expert}")
            self.down[expert] = read(f"{prefix}.experts.{expert}.down_proj.weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        experts, weights = self.router(x)
        out = self._routed(x, experts, weights)
        return out if self.shared is None else out.add_(self.shared(x))

    def _routed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens sorted by expert, so that each expert is one product over a contiguous run."""
        top_k = experts.shape[1]
        flat = experts.reshape(-1)
        order = flat.argsort()
        runs = torch.bincount(flat, minlength=self.gate_up.shape[0]).tolist()
        inputs = x[order // top_k]
        outputs = torch.empty_like(x).repeat(top_k, 1)
        start = 0
        for expert, length in enumerate(runs):
            if length:
                end = start + length
                inner = _gated(F.linear(inputs[start:end], self.gate_up[expert]))
                torch.mm(inner, self.down[expert].T, out=outputs[start:end])
                start = end
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        chosen = outputs[back].view(*experts.shape, -1)
        return torch.bmm(weights[:, None].to(x.dtype), chosen)[:, 0]
