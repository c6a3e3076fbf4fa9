"""The engine's GPU path: its host side, the whole of it but graphs on the interpreter, and all of it on a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from irminsul_backend.config import ServerConfig
from irminsul_backend.engine import resolve_device
from irminsul_backend.engine.batch import DecodeBuffer, Piece, batch_buckets, bucket_of, upload_together
from irminsul_backend.engine.placement import GIB, gpu_capacity, refuse_weights, trial_step
from irminsul_backend.engine.sampler import Sampler, sample_on_device
from irminsul_backend.errors import ServerStartError
from irminsul_backend.model import MLAModel, load_model, parse_config
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

pytest.importorskip("triton")
from irminsul_backend.engine.decoder import Decoder

SCRIPT = Path(__file__).with_name("kernel_engine.py")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


class TestBuckets:
    @pytest.mark.parametrize(
        ("most", "buckets"),
        [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (64, [1, 2, 4, 8, 16, 32, 64])],
    )
    def test_powers_of_two_and_the_largest_batch(self, most: int, buckets: list[int]) -> None:
        assert batch_buckets(most) == buckets

    def test_every_batch_has_the_smallest_that_holds_it(self) -> None:
        buckets = batch_buckets(48)
        for n in range(1, 49):
            bucket = bucket_of(n, buckets)
            assert bucket is not None and bucket >= n
            assert not any(n <= b < bucket for b in buckets)
        assert bucket_of(49, buckets) is None


class TestDecodeBuffer:
    @pytest.mark.parametrize(("n", "bucket"), [(1, 1), (1, 2), (3, 4), (4, 4), (5, 7), (0, 8)])
    def test_what_is_packed_is_what_the_kernels_read(self, rng: np.random.Generator, n: int, bucket: int) -> None:
        scratch = 1000
        lengths = rng.integers(1, 60, n)
        pieces = [
            Piece(rng.integers(0, 99, 1).astype(np.int32), np.array([length - 1]), self.slots(rng, length + 9), True)
            for length in lengths
        ]
        layout = DecodeBuffer(bucket)
        buffer = layout.pack(pieces, scratch)
        assert buffer.dtype == np.int32 and layout.first_slot % 4 == 0
        # the device's buffer is longer; what an earlier step left behind must not matter
        device = torch.full((len(buffer) + 50,), 7777, dtype=torch.int32)
        device[: len(buffer)] = torch.from_numpy(buffer)
        kv_indptr, token_ids, positions, new_slots, slots = layout.views(device)
        assert len(kv_indptr) == bucket + 1
        for i, piece in enumerate(pieces):
            keys = slots[kv_indptr[i] : kv_indptr[i + 1]]
            assert keys.tolist() == piece.slots[: piece.positions[0] + 1].tolist()
            assert (token_ids[i], positions[i], new_slots[i]) == (piece.token_ids[0], piece.positions[0], keys[-1])
        for i in range(n, bucket):
            assert kv_indptr[i] == kv_indptr[i + 1], "padding has rows"
            assert (token_ids[i], positions[i], new_slots[i]) == (0, 0, scratch)

    @staticmethod
    def slots(rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.permutation(900)[:n].astype(np.int32)


def test_one_upload_for_all_vectors() -> None:
    arrays = [np.array([1, 2], np.int32), np.array([], np.int64), np.array([2**40], np.int64)]
    found = upload_together(arrays, torch.device("cpu"))
    assert [t.tolist() for t in found] == [[1, 2], [], [2**40]]
    assert {t.dtype for t in found} == {torch.int64}


class TestMemory:
    """141 GiB of a GPU, rows of 31,104 bytes (27 layers of 576 numbers)."""

    row_bytes, total = 27 * 576 * 2, 141 * GIB

    def capacity(self, wanted: int = 0, fraction: float = 0.9, taken: int = 31 * GIB, workspace: int = 2 * GIB) -> int:
        return gpu_capacity(wanted, self.row_bytes, self.total, fraction, taken, workspace)

    def test_the_pool_takes_what_is_left_and_no_more(self) -> None:
        slots = self.capacity()
        room = 0.9 * self.total - 33 * GIB
        assert slots * self.row_bytes <= room < (slots + 1) * self.row_bytes

    def test_an_explicit_capacity_is_kept_if_it_fits(self) -> None:
        assert self.capacity(wanted=self.capacity()) == self.capacity()
        assert self.capacity(wanted=5000) == 5000

    def test_a_pool_that_does_not_fit_names_both_sizes(self) -> None:
        most = self.capacity()
        with pytest.raises(ServerStartError, match=r"takes 289\.\d\d GiB .* and 93\.90 GiB are left") as error:
            self.capacity(wanted=10_000_000)
        assert f"use at most {most} or 0" in str(error.value)

    def test_a_model_that_leaves_no_room(self) -> None:
        with pytest.raises(
            ServerStartError, match=r"least KV pool of 1024 tokens takes 0\.03 GiB .* 0\.00 GiB are left"
        ):
            self.capacity(taken=130 * GIB)

    def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(self) -> None:
        refuse_weights(30 * GIB, 40 * GIB, 0.9, 6 * GIB)
        with pytest.raises(ServerStartError, match=r"take 30\.1 GiB and 30\.0 GiB may be used: .* 6\.0 GiB that other"):
            refuse_weights(int(30.1 * GIB), 40 * GIB, 0.9, 6 * GIB)

    @pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
    def test_a_fraction_out_of_range(self, fraction: float) -> None:
        with pytest.raises(ServerStartError, match="gpu_memory_fraction is"):
            resolve_device(ServerConfig(device="cpu", gpu_memory_fraction=fraction))

    @pytest.mark.parametrize(
        ("tokens", "running", "longest"), [(1024, 64, 8192), (16, 64, 100), (1, 1, 50), (300, 8, 20)]
    )
    def test_the_trial_is_a_whole_step_in_a_small_pool(self, tokens: int, running: int, longest: int) -> None:
        pieces = trial_step(tokens, running, longest, tokens)
        assert sum(len(p.positions) for p in pieces) == tokens
        assert len(pieces) == min(tokens, running) and all(p.wants_logits for p in pieces)
        new = np.concatenate([p.slots[p.positions] for p in pieces])
        assert len(set(new.tolist())) == tokens, "two tokens write one row"
        for p in pieces:
            assert p.slots.max() < tokens and len(p.slots) == p.positions[-1] + 1 >= longest


class TestSamplingOnTheDevice:
    """Without interpreter and GPU the wrapper computes the reference of the kernel; what it is given is tested here."""

    @staticmethod
    def sampler(**params: Any) -> Sampler:
        fields = {name: params.pop(name) for name in ("bad_words", "return_log_probs") if name in params}
        request = GenerationRequest(key="k", sampling=SamplingParams(**params), **fields)
        return Sampler(request, np.zeros(1, np.int32), 12)

    def test_it_serves_all_that_ask_for_no_log_probs(self) -> None:
        assert self.sampler(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.1, bad_words=[[3]]).is_plain
        assert not self.sampler(return_log_probs=True).is_plain

    def test_a_row_that_is_not_finite_is_told(self) -> None:
        logits = torch.zeros(3, 12)
        logits[1, 4], logits[2, 0] = float("nan"), float("inf")
        assert sample_on_device(logits, [self.sampler() for _ in range(3)])[1] == [True, False, False]

    @pytest.mark.parametrize("seed", [0, -3, 2**63, 2**64 - 1])
    def test_a_stream_depends_on_the_seed_and_the_tokens_before(self, seed: int) -> None:
        logits = torch.randn(12, generator=torch.Generator().manual_seed(2))
        streams = []
        for beside in (0, 3):
            one, others = self.sampler(temperature=1.0, seed=seed), [self.sampler(temperature=1.0)] * beside
            tokens = []
            for _ in range(20):
                (*_, token), _ = sample_on_device(logits.repeat(beside + 1, 1), [*others, one])
                one.accept(token)
                tokens.append(token)
            streams.append(tokens)
        assert streams[0] == streams[1] and len(set(streams[0])) > 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the second with experts; rows of 64 + 32, as the interpreter is slow."""
    from safetensors.torch import save_file

    from irminsul_backend.model.random_weights import random_weights
    from irminsul_backend.training.train import CONFIG

    values = CONFIG | {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 0,
        "eos_token_id": 1, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(values))
    save_file(random_weights(parse_config(values), seed=7), path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def cpu_model(folder: Path) -> MLAModel:
    return load_model(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def gpu_model(folder: Path) -> MLAModel:
    return load_model(folder, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_engine", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_steps(steps: dict[str, list[float]]) -> None:
    """Distances are those of bf16: of activations rounded at other places, four or five times a layer."""
    for name, distances in steps.items():
        assert max(distances) < 0.02, name


def check_answers(kernels: dict[str, Any], torch_path: dict[str, Any]) -> None:
    for name in ("first", "moved", "same", "sampled", "cold", "penalised"):
        assert kernels[name] == torch_path[name], name
    assert kernels["moved"]["shifted"] > 50
    assert kernels["sampled"] == kernels["sampled again"], "the same seed, in another place of the batch"


@pytest.mark.interpreter
class TestByTheInterpreter:
    """The engine by kernels against the engine by torch: prefill, holes between moved rows, mixed and padded steps."""

    def test_the_same_logits_and_rows_as_torch(self, script: ModuleType, cpu_model: MLAModel) -> None:
        check_steps(script.steps(cpu_model))

    def test_the_same_answers_as_torch(self, script: ModuleType, cpu_model: MLAModel) -> None:
        check_answers(script.answers(cpu_model, True), script.answers(cpu_model, False))


class Recorder:
    """Stands in for CUDA graphs on the CPU: what is computed during capture is computed again at every replay."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder, self.compute, self.recording = decoder, decoder._compute, None
        self.replays = 0
        decoder._use_graphs = True
        monkeypatch.setattr(decoder, "_compute", self._compute)
        cuda = mock.MagicMock()
        cuda.CUDAGraph.side_effect = lambda: SimpleNamespace(replay=lambda: None)
        cuda.graph.side_effect = self._graph
        monkeypatch.setattr(torch, "cuda", cuda)
        self.cuda = cuda

    def _compute(self, bucket: int, splits: int) -> None:
        if self.recording is None:
            self.compute(bucket, splits)
        else:
            self.recording.replay = lambda: self._replay(bucket, splits)

    def _replay(self, bucket: int, splits: int) -> None:
        self.replays += 1
        self.compute(bucket, splits)

    @contextlib.contextmanager
    def _graph(self, graph: SimpleNamespace, **_: Any) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None


class TestGraphs:
    """Which graph is captured when, and what goes on without them. On the CPU decode computes its torch reference."""

    capacity = 1500

    @pytest.fixture
    def decoder(self, cpu_model: MLAModel) -> Decoder:
        model = cpu_model
        rows = torch.randn(model.config.num_layers, self.capacity + 1, model.config.row_size).bfloat16()
        rows[:, -1] = float("nan")
        base = torch.arange(self.capacity + 1, dtype=torch.int32) % 700
        return Decoder(model, rows, base, model.config.rope.turns, max_running=5)

    def pieces(self, rng: np.random.Generator, lengths: list[int]) -> list[Piece]:
        return [
            Piece(rng.integers(2, 512, 1), np.array([n - 1]), rng.permutation(self.capacity)[:n].astype(np.int32), True)
            for n in lengths
        ]

    def test_one_for_each_bucket_and_number_of_splits(
        self, decoder: Decoder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batches = [self.pieces(rng, lengths) for lengths in ([9], [30, 1, 8], [70, 3, 1, 4], [600], [9, 1400], [12])]
        rows, base = decoder.rows.clone(), decoder.base.clone()

        def forward(pieces: list[Piece]) -> torch.Tensor:
            """From the same pool each time: a batch writes rows that another one may read."""
            decoder.rows.copy_(rows), decoder.base.copy_(base)
            return decoder.forward(pieces).clone()

        plain = [forward(pieces) for pieces in batches]
        recorder = Recorder(decoder, monkeypatch)
        decoder.warm_up()
        assert sorted(bucket for bucket, _ in decoder._graphs) == [1, 2, 4, 5]
        replayed = [forward(pieces) for pieces in batches]
        assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
        assert recorder.replays == len(batches)
        graphs = len(decoder._graphs)
        assert graphs > 4, "lengths far from the usual one have other splits"
        decoder.forward(batches[3])
        assert len(decoder._graphs) == graphs == recorder.cuda.CUDAGraph.call_count

    def test_a_capture_that_fails_costs_the_graphs_only(
        self, decoder: Decoder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pieces = self.pieces(rng, [40, 7])
        plain = decoder.forward(pieces).clone()
        recorder = Recorder(decoder, monkeypatch)
        recorder.cuda.graph.side_effect = RuntimeError("operation not permitted when stream is capturing")
        assert torch.equal(decoder.forward(pieces), plain)
        assert not decoder._graphs and not decoder._use_graphs
        assert torch.equal(decoder.forward(pieces), plain)

    def test_which_steps_it_takes(self, decoder: Decoder, rng: np.random.Generator) -> None:
        one, prefill = self.pieces(rng, [10])[0], Piece(np.arange(3), np.arange(3), np.arange(3), True)
        assert decoder.takes([one] * 5)
        assert not decoder.takes([one] * 6), "more than the largest bucket"
        assert not decoder.takes([one, prefill])
        assert not decoder.takes([Piece(one.token_ids, one.positions, one.slots, False)])
        assert not decoder.takes([Piece(one.token_ids, np.array([self.capacity]), one.slots, True)]), (
            "beyond its buffer"
        )


class TestOnAGPU:
    pytestmark = needs_gpu

    def test_the_same_as_torch(self, script: ModuleType, gpu_model: MLAModel) -> None:
        check_steps(script.steps(gpu_model))
        check_answers(script.answers(gpu_model, True), script.answers(gpu_model, False))

    def test_a_replayed_graph_gives_what_its_kernels_give(self, gpu_model: MLAModel) -> None:
        from irminsul_backend.engine.runner import ModelRunner

        rng = np.random.default_rng(1)
        runner = ModelRunner(gpu_model, 1000, max_running=6)
        runner.rows.normal_()
        runner.warm_up()
        decoder = runner._decoder
        assert decoder is not None and len(decoder._graphs) == 4, "1, 2, 4, 6"
        for n in (1, 3, 5, 6, 2):
            lengths = rng.integers(1, 900, n)
            pieces = [
                Piece(rng.integers(0, 512, 1), np.array([x - 1]), rng.permutation(1000)[:x].astype(np.int32), True)
                for x in lengths
            ]
            replayed = runner.forward(pieces, np.zeros(1000, np.int32)).clone()
            decoder._use_graphs, graphs, decoder._graphs = False, decoder._graphs, {}
            eager = runner.forward(pieces, np.zeros(1000, np.int32))
            decoder._use_graphs, decoder._graphs = True, graphs
            assert torch.equal(replayed, eager)

    def test_a_decode_step_waits_for_nothing(self, gpu_model: MLAModel) -> None:
        from irminsul_backend.engine.runner import ModelRunner

        runner = ModelRunner(gpu_model, 1000, max_running=2)
        runner.warm_up()
        piece = Piece(np.array([5], np.int32), np.array([9]), np.arange(10, dtype=np.int32), True)
        runner.forward([piece], np.zeros(1000, np.int32))
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.forward([piece], np.zeros(1000, np.int32))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_pool_that_does_not_fit(self, folder: Path) -> None:
        from irminsul_backend.engine import Engine

        with pytest.raises(ServerStartError, match=r"capacity_tokens 10000000000 takes .* are left"):
            Engine.from_config(ServerConfig(model=str(folder), device="cuda", capacity_tokens=10**10))
        engine = Engine.from_config(ServerConfig(model=str(folder), device="cuda", gpu_memory_fraction=0.5))
        assert engine.cache.pool.capacity > 10_000
