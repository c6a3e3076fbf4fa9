"""Feed-forward blocks: the gated MLP, the expert router, and the mixture of experts."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model.checkpoint import TensorSource
from irminsul_backend.model.model_config import ModelConfig

HAS_TRITON = find_spec("triton") is not None


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2 * inner] contiguous -> [..., inner]"""
    if gate_up.is_cuda and HAS_TRITON:
        from irminsul_kernels.ops.activation import silu_gate

        return silu_gate(gate_up)  # one launch that moves 3 numbers for each result, where torch's two move 5
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class MLP:
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self.gate_up = source.read(f"{name}.gate_up")  # one matrix [2 * inner, hidden]: one product instead of two
        self.down = source.read(f"{name}.down")

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

    def __init__(self, config: ModelConfig, source: TensorSource, name: str) -> None:
        self.top_k = config.num_experts_per_tok
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.sigmoid = config.topk_method == "noaux_tc"
        self.normalise = config.norm_topk_prob
        self.scale = config.routed_scaling_factor if self.sigmoid or not self.normalise else 1.0
        self.weight = source.read(f"{name}.router")
        self.bias = source.read(f"{name}.router_bias") if self.sigmoid else None

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


def check_alignment(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """What keeps grouped products from reading the experts' matrices: rows must start at multiples of 16 bytes."""
    multiple = 16 // dtype.itemsize
    for field in ("hidden_size", "moe_intermediate_size"):
        if config.n_routed_experts and getattr(config, field) % multiple:
            name = str(dtype).removeprefix("torch.")
            return f"{field} is {getattr(config, field)}; experts in {name} need a multiple of {multiple}"
    return None


class MoE:
    """Routed experts, weighted, plus shared experts that see every token.

    The routed part is two grouped products over the tokens sorted by expert: no loop over experts and nothing that the
    host has to wait for, and an expert that no token chose is not read. torch has kernels for bfloat16 on GPUs from
    compute capability 8.0 on; other dtypes there, and the CPU, take its own loop, which was as fast as ours or faster
    (V2-Lite's layer, two cores, bfloat16: 7.5 against 8.0 ms for 1 token, 66 against 71 ms for 64).

    Raises UnsupportedModelError if the kernels cannot read the experts' matrices.
    """

    def __init__(self, config: ModelConfig, source: TensorSource, name: str) -> None:
        if problem := check_alignment(config, source.dtype):
            raise UnsupportedModelError(f"config.json: {problem}")
        self.router = Router(config, source, name)
        self.shared = MLP(source, f"{name}.shared") if config.n_shared_experts else None
        self.gate_up = source.read(f"{name}.experts.gate_up")
        self.down = source.read(f"{name}.experts.down")
        self.ids = torch.arange(config.n_routed_experts, device=source.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        experts, weights = self.router(x)
        out = self._routed(x, experts, weights)
        return out if self.shared is None else out.add_(self.shared(x))

    def _routed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], experts int64 [T, k], weights float32 [T, k] -> [T, hidden]"""
        top_k = experts.shape[1]
        chosen, order = experts.flatten().sort()
        ends = torch.searchsorted(chosen, self.ids, right=True, out_int32=True)  # of each expert's run of rows
        inner = _gated(F.grouped_mm(x[order // top_k], self.gate_up.mT, offs=ends))
        outputs = F.grouped_mm(inner, self.down.mT, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return torch.bmm(weights[:, None].to(x.dtype), outputs[back].view(*experts.shape, -1))[:, 0]
