"""Decode steps on a GPU: one token of each sequence, padded to a batch bucket and replayed as a CUDA graph.

A graph replays with fixed addresses. So the inputs of a step are copied from pinned memory into one static buffer, and
everything else is computed from them inside the graph: new base positions, the rows' places, attention, logits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from irminsul_kernels.attention.decode import decode_attention, tuning
from irminsul_kernels.attention.plans import plan_splits, workspace_size
from torch import Tensor

from irminsul_backend.engine.batch import DecodeBuffer, Piece, batch_buckets, bucket_of, pinned
from irminsul_backend.model import MLAModel

log = logging.getLogger(__name__)

USUAL_KEYS = 4096
"""Length in keys of the longest sequence for which the graphs captured at start-up are planned."""
LEAST_KEYS = 512
"""Shortest length in keys for which a graph is planned; shorter sequences use the same one."""


class _DecodeContext:
    """AttentionContext of one padded batch: writes the rows of its tokens, then attends with the decode kernel."""

    def __init__(self, decoder: Decoder, buffer: DecodeBuffer, splits: int) -> None:
        self._rows, self._base, self._turns = decoder.rows, decoder.base, decoder.turns
        self._scale, self._splits, self._workspace = decoder.model.config.softmax_scale, splits, decoder.workspace
        self._kv_indptr, _, _, new_slots, self._slots = buffer.views(decoder.buffer)
        self._new_slots = new_slots.long()

    def attend(self, layer: int, q_nope: Tensor, q_rope: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        pool = self._rows[layer]
        pool.index_copy_(0, self._new_slots, rows)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1).contiguous()
        mixed, _ = decode_attention(
            q_latent, q_rope.contiguous(), pool, self._base, self._slots, self._kv_indptr, self._turns, self._scale,
            max_length=0, num_splits=self._splits, workspace=self._workspace,
        )  # fmt: skip
        return torch.bmm(mixed.transpose(0, 1), w_uv).transpose(0, 1)


class Decoder:
    """Runs decode steps, in which every sequence computes one token and needs its logits."""

    def __init__(self, model: MLAModel, rows: Tensor, base: Tensor, turns: Tensor, max_running: int) -> None:
        """Allocate the static buffers.

        Args:
            rows: [layers, capacity + 1, R + d]; the last slot takes the rows of padding.
            base: int32 [capacity + 1] on the device, updated by every step.
            turns: int64 [d/2] on the device, as in Rope.
            max_running: largest batch.
        """
        self.model, self.rows, self.base, self.turns = model, rows, base, turns
        config, device = model.config, model.device
        self._buckets = batch_buckets(max_running)
        self._longest = min(rows.shape[1] - 1, config.max_position_embeddings)
        header = DecodeBuffer(max_running).first_slot
        self.buffer = torch.zeros(header + max_running * self._longest, dtype=torch.int32, device=device)
        self._logits = torch.zeros(max_running, config.vocab_size, device=device)
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self._arch, self._num_sms = 10 * found.major + found.minor, found.multi_processor_count
        else:
            self._arch, self._num_sms = 90, 132
        self.workspace = torch.zeros(self._most_workspace(), device=device)
        # grouped matmuls of float16 experts synchronise with the device, which a graph cannot
        capturable = model.dtype == torch.bfloat16 or config.n_routed_experts == 0
        self._use_graphs = device.type == "cuda" and capturable
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._use_graphs else None

    def takes(self, pieces: Sequence[Piece]) -> bool:
        """Whether :meth:`forward` can compute the step."""
        if any(len(p.positions) != 1 or not p.wants_logits for p in pieces):
            return False
        fits = all(p.positions[0] < self._longest for p in pieces)
        return fits and bucket_of(len(pieces), self._buckets) is not None

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute a step; returns its logits, float32 [pieces, vocab], valid until the next call."""
        bucket = bucket_of(len(pieces), self._buckets)
        assert bucket is not None, "takes() was not asked"
        packed = DecodeBuffer(bucket).pack(pieces, self.rows.shape[1] - 1)
        self.buffer[: len(packed)].copy_(pinned(packed, self.model.device), non_blocking=True)
        splits = self._splits(bucket, max(int(p.positions[0]) + 1 for p in pieces))
        if self._use_graphs and (bucket, splits) not in self._graphs:
            self._capture(bucket, splits)
        graph = self._graphs.get((bucket, splits))
        if graph is None:
            self._compute(bucket, splits)
        else:
            graph.replay()
        return self._logits[: len(pieces)]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture a graph per bucket for sequences of usual length, so that the first requests do not wait for it."""
        if not self._use_graphs:
            return
        for bucket in reversed(self._buckets):  # the largest first: the others reuse its memory
            packed = DecodeBuffer(bucket).pack([], self.rows.shape[1] - 1)
            self.buffer[: len(packed)].copy_(pinned(packed, self.model.device), non_blocking=True)
            self._capture(bucket, self._splits(bucket, min(USUAL_KEYS, self._longest)))
        torch.cuda.synchronize(self.model.device)

    def _splits(self, bucket: int, longest: int) -> int:
        """Return the KV splits for `longest` keys, rounded up to a power of two so that few graphs are needed."""
        config = self.model.config
        tune = tuning(config.kv_lora_rank, self._arch)
        keys = max(LEAST_KEYS, 1 << (longest - 1).bit_length())
        return plan_splits(bucket, config.num_heads, keys, self._num_sms, tune)

    def _most_workspace(self) -> int:
        config, most, keys = self.model.config, 1, LEAST_KEYS
        while True:
            for bucket in self._buckets:
                splits = self._splits(bucket, keys)
                most = max(most, workspace_size(bucket, config.num_heads, config.kv_lora_rank, splits))
            if keys >= self._longest:
                return most
            keys *= 2

    def _compute(self, bucket: int, splits: int) -> None:
        """Compute the logits from the buffer's contents, without synchronising with the device."""
        layout = DecodeBuffer(bucket)
        _, token_ids, positions, new_slots, _ = layout.views(self.buffer)
        self.base.index_copy_(0, new_slots.long(), positions)
        context = _DecodeContext(self, layout, splits)
        hidden = self.model.forward(token_ids.long(), positions.long(), context)
        self._logits[:bucket].copy_(self.model.compute_logits(hidden))

    def _capture(self, bucket: int, splits: int) -> None:
        """Capture the step as a graph. If that fails, decoding goes on without graphs."""
        try:
            stream = torch.cuda.Stream(self.model.device)
            stream.wait_stream(torch.cuda.current_stream(self.model.device))
            with torch.cuda.stream(stream):  # compiles kernels and fills libraries' workspaces, which a graph cannot
                self._compute(bucket, splits)
            torch.cuda.current_stream(self.model.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._compute(bucket, splits)
        except Exception:
            log.exception("no CUDA graph of %d sequences; decoding goes on without graphs", bucket)
            self._use_graphs = False
            self._graphs.clear()
            return
        self._graphs[bucket, splits] = graph
