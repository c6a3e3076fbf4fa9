"""`python -m irminsul_backend.benchmarks.gpu_engine`: the engine on a GPU, with random weights of V2-Lite's shapes.

Random weights cost as much as trained ones, except in the router: here tokens are spread evenly over the experts. Times
are the engine's own, from `submit` to the event; they include neither text processing nor HTTP nor Triton.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from irminsul_kernels.bench import command
from irminsul_kernels.bench.report import Bar, Report, Row

from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.engine import Engine
from irminsul_backend.model import MLAModel, ModelConfig, load_model, parse_config
from irminsul_backend.model.loading import memory_bytes
from irminsul_backend.model.random_weights import random_weights
from irminsul_backend.model.register import family_of
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.request_spec import SamplingParams

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102_400,
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "rope_theta": 10_000.0, "bos_token_id": 100_000, "eos_token_id": 100_001,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
"""config.json as published, as far as it is about the arithmetic."""
POOL_TOKENS = 200_000
RESERVE = 6 * 2**30
"""Bytes for a step's workspace, CUDA graphs and the libraries."""
BATCH_TOKENS, MAX_RUNNING = 8192, 64
PROMPTS, SHARES, BATCHES = (2048, 8192, 16_384, 32_768), (0.0, 0.5, 0.95), (1, 8, 64)
BAR_PROMPT = 16_384
REPEATS = 5
ENERGY_SECONDS = 1.0
"""NVML's counter moves a few times a second: energy is measured over at least this."""
DECODE_PROMPT, DECODE_TOKENS = 1024, 200
PEER_LAYERS, PEER_VOCAB = 2, 16_384


def fit_layers(config: ModelConfig, free: int, itemsize: int = 2) -> int:
    """Most layers, up to the config's, whose weights and POOL_TOKENS rows fit `free` bytes; 0 if not even two do."""
    for layers in range(config.num_layers, 1, -1):
        size = memory_bytes(replace(config, num_layers=layers), itemsize)
        if size + layers * config.row_size * itemsize * POOL_TOKENS + RESERVE <= free:
            return layers
    return 0


class RandomCheckpoint:
    """A TensorSource that draws every tensor on the device when it is read."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._weights = family_of(config).sanitize(config)
        self._generator = torch.Generator(device).manual_seed(seed)

    def read(self, name: str) -> torch.Tensor:
        """Norms are 1; a matrix keeps the size of its input, those that add to the residual stream less."""
        weight = self._weights[name]
        if len(weight.shape) == 1:
            return torch.ones(weight.shape, device=self.device, dtype=torch.float32 if weight.float32 else self.dtype)
        fan_in = weight.shape[1] if name.endswith("w_uv") else weight.shape[-1]
        adds = name.endswith(".o") or (".feed_forward." in name and name.endswith(".down"))
        std = 1.0 if name == "embedding" else fan_in**-0.5 * (0.3 if adds else 1.0)
        out = torch.empty(weight.shape, device=self.device, dtype=torch.float32 if weight.float32 else self.dtype)
        return out.normal_(std=std, generator=self._generator)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> MLAModel:
    with torch.inference_mode():
        return family_of(config).build(config, RandomCheckpoint(config, device, dtype))


@dataclass
class Running:
    """A request that was submitted; times in seconds since then."""

    started: float
    times: list[float] = field(default_factory=list)
    """Of each token."""
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def on_event(self, event: Event) -> None:
        self.times += [time.perf_counter() - self.started] * len(event.token_ids)
        self.tokens += event.token_ids
        if event.kind in ("finished", "error"):
            self.usage, self.error = event.usage, event.error
            self.done.set()

    def wait(self) -> Running:
        """Until it has ended; raises RuntimeError if it failed."""
        if not self.done.wait(300):
            raise RuntimeError("a request did not end within 300 s")
        if self.error:
            raise RuntimeError(self.error)
        return self


class Client:
    """Submits token ids to an engine as the chunker would."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine, self._rng, self._keys = engine, np.random.default_rng(seed), itertools.count()
        self._preset = PRESETS["default"]

    def ids(self, n: int) -> np.ndarray:
        return self._rng.integers(10, self._engine.runner.model.config.vocab_size - 10, n).astype(np.int32)

    def submit(self, ids: np.ndarray, namespace: str, reuse: str = "off", max_tokens: int = 1) -> Running:
        ends = cut(ids, self._preset, None)
        prints = fingerprint(ids, ends, namespace, self._preset.gram)
        key = f"bench {next(self._keys)}"
        request = GenerationRequest(
            key=key, session_id=key, namespace=namespace, reuse=reuse,
            sampling=SamplingParams(max_tokens=max_tokens),
        )  # fmt: skip
        running = Running(time.perf_counter())
        self._engine.submit(request, ids, ends, prints, running.on_event)
        return running

    def prompt(self, n: int, share: float, known: np.ndarray) -> np.ndarray:
        """n tokens: a new header of 51, `share` of n from the start of `known`, then new text."""
        body = known[: round(share * n)]
        return np.concatenate((self.ids(51), body, self.ids(n - 51 - len(body))))


class EnergyMeter:
    """Joules that the GPU has taken since some time in the past; None where NVML cannot say."""

    def __init__(self, device: torch.device) -> None:
        self.why_not = ""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except Exception as problem:  # not installed, or NVML's own error classes
            self.why_not = f"{type(problem).__name__}: {problem}"
            self._read: Callable[[], float] | None = None
        else:
            self._read = lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    def joules(self) -> float | None:
        return None if self._read is None else float(self._read())


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m irminsul_backend.benchmarks.gpu_engine",
        description="Time the engine on an NVIDIA GPU of this machine, on a model of DeepSeek-V2-Lite's shapes with "
        "random weights: time to first token by prompt length and reused share, tokens/s by batch size, joules per "
        "request, and the same greedy requests by transformers where that is installed.",
        epilog="The kernels alone: python -m irminsul_kernels.bench.",
    )
    return command.run(
        parser,
        argv,
        lambda _, report, device: command.run_part(report, "engine", lambda: measure(report, device)),
        packages=("irminsul", "transformers"),
    )


def measure(report: Report, device: torch.device) -> None:
    """Add the engine's timings, the bars and what was skipped to `report`."""
    config = parse_config(V2_LITE)
    layers = fit_layers(config, torch.cuda.mem_get_info(device)[0])
    if layers == 0:
        report.skipped.append(("engine", "not even two layers of V2-Lite and their pool fit the free GPU memory"))
        return
    what = f"V2-Lite's shapes, {layers} of {config.num_layers} layers"
    model = random_model(replace(config, num_layers=layers), device)
    meter = EnergyMeter(device)
    if meter.why_not:
        report.skipped.append(("joules", f"no energy counter: {meter.why_not}"))
    engine = Engine(model, POOL_TOKENS, PRESETS["default"], max_batch_tokens=BATCH_TOKENS, max_running=MAX_RUNNING)
    engine.runner.warm_up()
    engine.start()
    try:
        first_token_times(report, Client(engine), meter, what)
        decode_rates(report, Client(engine, seed=1), meter, what)
    finally:
        engine.close()
    del engine, model
    torch.cuda.empty_cache()
    against_transformers(report, device)


def first_token_times(report: Report, client: Client, meter: EnergyMeter, what: str) -> None:
    """TTFT by prompt length and share of the prompt that is known and moved by 11 positions."""
    medians: dict[tuple[int, float], float] = {}
    for n, share in itertools.product(PROMPTS, SHARES):
        namespace = f"{n} {share}"
        known = client.ids(n)
        if share:
            client.submit(np.concatenate((client.ids(40), known[: round(share * n)])), namespace, "content").wait()
        reuse = "content" if share else "off"
        times: list[float] = []
        client.submit(client.prompt(n, share, known), namespace, reuse).wait()
        began, before = time.perf_counter(), meter.joules()
        least = ENERGY_SECONDS if n == BAR_PROMPT and before is not None else 0.0
        while len(times) < REPEATS or time.perf_counter() - began < least:
            one = client.submit(client.prompt(n, share, known), namespace, reuse).wait()
            times.append(one.times[0])
        after, usage = meter.joules(), one.usage
        assert usage is not None
        note = f"{what}; {usage.shifted_tokens} tokens reused, {usage.computed_tokens} computed"
        if least and before is not None and after is not None:
            note += f"; {(after - before) / len(times):.3g} J a request"
        us = 1e6 * statistics.median(times)
        medians[n, share] = us
        rate = n / us * 1e6
        report.rows.append(
            Row("engine", f"TTFT, {share:.0%} known", f"{n} tokens", us, rate, "prompt tokens/s", None, note)
        )
    ratio = medians[BAR_PROMPT, 0.95] / medians[BAR_PROMPT, 0.0]
    report.bars.append(Bar("TTFT at 16k with 95 % reuse over reuse off (<= 0.1)", ratio, 0.1, False))


def decode_rates(report: Report, client: Client, meter: EnergyMeter, what: str) -> None:
    """Tokens a second while the whole batch decodes: every sequence has rows of its own."""
    for batch in BATCHES:
        warm = [client.submit(client.ids(64), "warm", max_tokens=8) for _ in range(batch)]
        for one in warm:
            one.wait()
        before = meter.joules()
        running = [client.submit(client.ids(DECODE_PROMPT), "d", max_tokens=DECODE_TOKENS) for _ in range(batch)]
        for one in running:
            one.wait()
        after = meter.joules()
        rate = window_rate([[one.started + t for t in one.times] for one in running])
        note = what
        if before is not None and after is not None:
            note += f"; {(after - before) / batch:.3g} J a request of {DECODE_PROMPT} + {DECODE_TOKENS} tokens"
        case = f"batch {batch}, {DECODE_PROMPT} tokens and more"
        report.rows.append(Row("engine", "decode step", case, 1e6 * batch / rate, rate, "tokens/s", None, note))


def window_rate(times: list[list[float]]) -> float:
    """Tokens a second of all streams between the last one's first token and the first one's last."""
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(start < t <= end for stream in times for t in stream) / (end - start)


def against_transformers(report: Report, device: torch.device) -> None:
    """Two layers with the same weights in both; prompt of 2,048 tokens, 64 generated, one request."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as problem:
        report.skipped.append(("transformers", str(problem)))
        return
    values = V2_LITE | {
        "num_hidden_layers": PEER_LAYERS,
        "vocab_size": PEER_VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    what = f"V2-Lite's shapes, {PEER_LAYERS} layers, vocabulary {PEER_VOCAB}"
    try:
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(values))
            save_file(random_weights(parse_config(values), seed=7), Path(folder) / "model.safetensors")
            ours = load_model(folder, device=str(device), dtype=torch.bfloat16)
            theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            theirs = theirs.to(device).eval()
    except Exception as problem:  # disk, memory, or a version that does not know the architecture
        report.skipped.append(("transformers", f"{type(problem).__name__}: {str(problem)[:200]}"))
        return
    new = 64
    engine = Engine(ours, 8192, PRESETS["default"], max_batch_tokens=BATCH_TOKENS, max_running=1)
    engine.runner.warm_up()
    engine.start()
    client = Client(engine)
    prompt = client.ids(2048)
    try:
        runs = [client.submit(prompt, "t", max_tokens=new).wait() for _ in range(REPEATS + 1)][1:]
    finally:
        engine.close()
    case = f"2048 tokens, {new} generated"
    for name, first, step, tokens in (
        ("Irminsul", *_medians([run.times for run in runs]), runs[0].tokens),
        ("transformers", *_transformers_times(theirs, torch.from_numpy(prompt).to(device), new)),
    ):
        same = sum(itertools.takewhile(bool, (a == b for a, b in zip(tokens, runs[0].tokens, strict=False))))
        note = what if name == "Irminsul" else f"{what}; the first {same} tokens are the same (bf16)"
        report.rows.append(
            Row("engine", f"{name}, TTFT", case, 1e6 * first, 2048 / first, "prompt tokens/s", None, note)
        )
        report.rows.append(Row("engine", f"{name}, decode step", case, 1e6 * step, 1 / step, "tokens/s", None, what))


def _medians(times: list[list[float]]) -> tuple[float, float]:
    """Seconds to the first token, and from token to token."""
    steps = [(t[-1] - t[0]) / (len(t) - 1) for t in times]
    return statistics.median(t[0] for t in times), statistics.median(steps)


@torch.inference_mode()
def _transformers_times(model: Any, prompt: torch.Tensor, new: int) -> tuple[float, float, list[int]]:
    """Greedy decoding by hand: `generate` has a start-up cost of its own, which is left out in their favour."""
    times: list[list[float]] = []
    tokens: list[int] = []
    for _ in range(REPEATS + 1):
        if prompt.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        out = model(input_ids=prompt[None].long(), use_cache=True, logits_to_keep=1)
        tokens, stamps = [int(out.logits[0, -1].argmax())], [time.perf_counter() - started]
        for _ in range(new - 1):
            step = torch.tensor([[tokens[-1]]], device=prompt.device)
            out = model(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
            stamps.append(time.perf_counter() - started)
        times.append(stamps)
    return *_medians(times[1:]), tokens


if __name__ == "__main__":
    sys.exit(main())
