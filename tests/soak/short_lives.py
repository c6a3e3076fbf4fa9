"""Many short lives of a server under load: `python -m soak.short_lives LIVES [--all-clients] [--lock-check]` in tests/.

Each life starts a server, loads it with three clients for some seconds and stops it. Starting and stopping are part of
the test: races between threads show there. Run two at once, so that the cores are contended; IRMINSUL_MODEL may name a
smaller model than the shipped one, which makes more requests a second. Prints a line for each life; the exit code is 1
if any process crashed or any request failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

from irminsul_backend.config import ServerConfig
from irminsul_backend.triton_io.server.addresses import Ports
from irminsul_backend.triton_io.server.launcher import start_server
from soak import lock_check, traffic


def one_life(seconds: float, all_clients: bool, seed: int) -> tuple[int, list[str]]:
    """Returns the number of client runs, and what went wrong."""
    begin = time.monotonic()
    clients = traffic.CLIENTS if all_clients else (traffic.whole_answers,) * 3
    server = start_server(replace(ServerConfig.from_env(), log_level="WARNING", threads=1), ports=Ports())
    try:
        processes = {child.pid for child in psutil.Process(server.process.pid).children(recursive=True)}
        counts, failures = traffic.run(server, clients, seconds, seed)
    finally:
        server.stop()
    return counts.total(), failures + lock_check.crashes(list(server.log)) + lock_check.segfaults(processes, begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lives", type=int)
    parser.add_argument("--seconds", type=float, default=14.0, help="of load in each life")
    parser.add_argument("--all-clients", action="store_true", help="every kind of client instead of three plain ones")
    parser.add_argument("--lock-check", action="store_true", help="abort when Python's memory is touched unlocked")
    options = parser.parse_args()
    wrong = total = 0
    with tempfile.TemporaryDirectory() as folder:
        if options.lock_check:
            check = lock_check.variables(Path(folder))
            if check is None:
                parser.error("--lock-check needs a C compiler (cc)")
            os.environ.update(check)
        else:
            os.environ["PYTHONFAULTHANDLER"] = "1"
        for life in range(options.lives):
            begin = time.monotonic()
            runs, problems = one_life(options.seconds, options.all_clients, life)
            total += runs
            wrong += bool(problems)
            print(f"life {life + 1}: {runs} runs, {time.monotonic() - begin:.0f} s: {problems or 'well'}", flush=True)
    print(f"{options.lives} lives, {total} runs, {wrong} lives went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
