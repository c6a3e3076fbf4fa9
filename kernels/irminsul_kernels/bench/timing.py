"""Median times on the GPU, and the device's copy bandwidth and matmul rate, which kernels are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

SLEEP_CYCLES = 2_000_000
"""About 1 ms, in which the host queues a whole measurement, so that launch latency is not measured."""
SECONDS = 0.3
"""Most seconds per measurement, of LEAST to MOST samples."""
LEAST, MOST = 5, 50


class Ceilings(NamedTuple):
    copy: float
    """GB/s, read and written bytes together."""
    matmul: float
    """TFLOP/s in bf16."""


class Timer:
    """Times calls with a cold L2 cache: it is overwritten before each call."""

    def __init__(self, device: torch.device) -> None:
        size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 20)
        self._other = torch.empty(size, dtype=torch.int8, device=device)

    def median_us(self, run: Callable[[], Any]) -> float:
        """Median GPU time of a call, in microseconds, after three calls to compile and warm up."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        samples = [self._sample(run) for _ in range(LEAST)]
        more = int(min(MOST, SECONDS * 1e6 / max(samples))) - LEAST
        samples += [self._sample(run) for _ in range(more)]
        return statistics.median(samples)

    def _sample(self, run: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        self._other.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)


def measure_copy(timer: Timer, device: torch.device) -> tuple[float, float]:
    """(microseconds, GB/s) of a device-to-device copy of 2 GiB, or of a sixteenth of the free memory."""
    size = min(2 << 30, torch.cuda.mem_get_info(device)[0] // 16)
    a, b = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    us = timer.median_us(lambda: b.copy_(a))
    return us, 2 * size / us / 1e3


def measure_matmul(timer: Timer, device: torch.device, size: int = 8192) -> tuple[float, float]:
    """(microseconds, TFLOP/s) of a square bf16 product of random matrices."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    us = timer.median_us(lambda: torch.mm(a, b, out=out))
    return us, 2 * size**3 / us / 1e6
