"""Run as a script, `loading_memory.py FOLDER DTYPE`: load a model and print how much memory that took, as JSON.

Counts anonymous memory only (RssAnon): pages of the mapped files are the kernel's to take back at any time.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

import torch

from irminsul_backend.model import load_model


def anonymous_bytes() -> int:
    """Resident memory of this process that is backed by no file."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)  # the libraries' own buffers are there before the first reading
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    start = time.perf_counter()
    finite = bool(model.logits(list(range(16))).isfinite().all())
    run_seconds = time.perf_counter() - start
    after = anonymous_bytes()
    print(json.dumps({"peak": peak - before, "seconds": seconds, "finite": finite, "run_seconds": run_seconds,
                      "after_run": after - before}))  # fmt: skip


if __name__ == "__main__":
    main()
