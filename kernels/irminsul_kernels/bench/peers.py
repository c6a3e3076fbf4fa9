"""Decode attention of other libraries, where they are installed, on the same rows at their base positions (no δ).

Each adapter returns a call, or raises: an API that is not the one known here is a reason to skip it, not to guess.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irminsul_kernels.bench.scenes import RANK, ROPE, SCALE, Scene

Call = Callable[[], Tensor]
"""-> [batch, heads, RANK]"""
PAGE = 64


def torch_sdpa(scene: Scene, q_latent: Tensor, q_rope: Tensor) -> Call:
    """Heads as the queries of one key head; equal lengths; the rows gathered beforehand, for nothing."""
    batch, length = len(scene.lengths), scene.lengths[0]
    keys = scene.rows[scene.slots.long()].view(batch, 1, length, RANK + ROPE)
    query = torch.cat((q_latent, q_rope), dim=2)[:, None]
    values = keys[..., :RANK].contiguous()
    return lambda: F.scaled_dot_product_attention(query, keys, values, scale=SCALE)[:, 0]


def flashinfer(scene: Scene, q_latent: Tensor, q_rope: Tensor) -> Call:
    """BatchMLAPagedAttentionWrapper with pages of one token; c_KV and k_r apart, as it wants them."""
    mla = importlib.import_module("flashinfer.mla")
    device, batch, heads = scene.rows.device, *q_latent.shape[:2]
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
    lengths = torch.tensor(scene.lengths, dtype=torch.int32, device=device)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device)
    dtype = q_latent.dtype
    wrapper.plan(
        indptr, scene.kv_indptr, scene.slots, lengths, heads, RANK, ROPE, 1, False, SCALE, dtype, scene.rows.dtype
    )
    c_kv, k_r = (part.contiguous()[:, None] for part in scene.rows.split((RANK, ROPE), dim=1))
    return lambda: wrapper.run(q_latent, q_rope, c_kv, k_r, return_lse=False)


def flash_mla(scene: Scene, q_latent: Tensor, q_rope: Tensor) -> Call:
    """Its pages of 64 tokens; lengths are multiples of that here."""
    library = importlib.import_module("flash_mla")
    batch, heads = q_latent.shape[:2]
    lengths = torch.tensor(scene.lengths, dtype=torch.int32, device=scene.rows.device)
    cache, table = _paged(scene)
    query = torch.cat((q_latent, q_rope), dim=2)[:, None]
    plan, splits = library.get_mla_metadata(lengths, heads, 1)

    def run() -> Tensor:
        out, _ = library.flash_mla_with_kvcache(
            query, cache, table, lengths, RANK, plan, splits, softmax_scale=SCALE, causal=True
        )
        return out.view(batch, heads, RANK)

    return run


def vllm_triton(scene: Scene, q_latent: Tensor, q_rope: Tensor) -> Call:
    """The Triton decode kernel that vLLM falls back to; 4 splits, its fixed number."""
    module = _first("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention")
    _check_names(module.decode_attention_fwd, ("q", "k_buffer", "v_buffer", "o"))
    batch, heads = q_latent.shape[:2]
    lengths = torch.tensor(scene.lengths, dtype=torch.int32, device=scene.rows.device)
    cache, table = _paged(scene)
    out = torch.empty_like(q_latent)
    splits = 4
    logits = torch.empty(batch, heads, splits, RANK + 1, device=out.device)
    given: dict[str, Any] = dict(
        q=torch.cat((q_latent, q_rope), dim=2), k_buffer=cache, v_buffer=cache[..., :RANK], o=out, req_to_token=table,
        b_seq_len=lengths, attn_logits=logits, num_kv_splits=splits, sm_scale=SCALE, page_size=PAGE,
    )  # fmt: skip
    if "lse" in inspect.signature(module.decode_attention_fwd).parameters:
        given["lse"] = torch.empty(batch, heads, device=out.device, dtype=out.dtype)

    def run() -> Tensor:
        module.decode_attention_fwd(**given)
        return out

    return run


def sglang_triton(scene: Scene, q_latent: Tensor, q_rope: Tensor) -> Call:
    """SGLang's Triton decode kernel, over flat slots like ours; 8 splits, its default."""
    module = _first("sglang.srt.layers.attention.triton_ops.decode_attention")
    names = ("q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "attn_logits", "attn_lse")
    _check_names(module.decode_attention_fwd, names)
    batch, heads = q_latent.shape[:2]
    out, splits = torch.empty_like(q_latent), 8
    keys = scene.rows[:, None]
    given: dict[str, Any] = dict(
        q=torch.cat((q_latent, q_rope), dim=2), k_buffer=keys, v_buffer=keys[..., :RANK], o=out,
        kv_indptr=scene.kv_indptr, kv_indices=scene.slots, sm_scale=SCALE, max_kv_splits=splits,
        attn_logits=torch.empty(batch, heads, splits, RANK, device=out.device),
        attn_lse=torch.empty(batch, heads, splits, device=out.device),
        num_kv_splits=torch.full((batch,), splits, dtype=torch.int32, device=out.device),
    )  # fmt: skip
    if "k_scale" in inspect.signature(module.decode_attention_fwd).parameters:
        given |= dict(k_scale=1.0, v_scale=1.0)

    def run() -> Tensor:
        module.decode_attention_fwd(**given)
        return out

    return run


ADAPTERS: dict[str, tuple[str, Callable[[Scene, Tensor, Tensor], Call]]] = {
    "torch SDPA": ("torch", torch_sdpa),
    "FlashInfer": ("flashinfer", flashinfer),
    "FlashMLA": ("flash_mla", flash_mla),
    "vLLM, Triton": ("vllm", vllm_triton),
    "SGLang, Triton": ("sglang", sglang_triton),
}
"""Name -> (package, adapter)."""


def _paged(scene: Scene) -> tuple[Tensor, Tensor]:
    """The rows in pages of 64 in order, [pages, 64, 1, RANK + ROPE], and the page table int32 [batch, pages].

    Raises:
        ValueError: lengths that are not all the same multiple of 64.
    """
    length = scene.lengths[0]
    if set(scene.lengths) != {length} or length % PAGE:
        raise ValueError(f"pages of {PAGE} need equal lengths in multiples of it, not {scene.lengths[:4]}...")
    cache = scene.rows[scene.slots.long()].view(-1, PAGE, 1, RANK + ROPE)
    table = torch.arange(len(cache), dtype=torch.int32, device=cache.device).view(len(scene.lengths), -1)
    return cache, table


def _first(*names: str) -> Any:
    """The first module that exists.

    Raises:
        ImportError: none does.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"{' and '.join(names)} do not exist in the installed version")


def _check_names(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found[: len(names)] != names:
        raise TypeError(f"{function.__name__}({', '.join(found[: len(names)])}, ...) is not the API known here")
