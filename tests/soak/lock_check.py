"""Makes Python abort in the models' processes when its memory is touched without the interpreter lock.

Triton's stub frees Python objects on threads of its own. Where that happens without the lock, memory is corrupted once
in thousands of requests; with this check the process ends at once, and says on which thread. PYTHONMALLOC=debug would
do the same, but the stub starts its interpreter in isolated mode, which ignores it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
__attribute__((constructor)) static void install(void) {
  void (*hooks)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "PyMem_SetupDebugHooks");
  if (hooks && strstr(program_invocation_short_name, "triton_python_b")) hooks();
}
"""
MESSAGE = "without holding the GIL"
CRASHES = ("Fatal Python error", "Segmentation fault", "died; the server ends")
"""What a server's log says of a process that crashed, at its end included."""


def variables(folder: Path) -> Mapping[str, str] | None:
    """The environment that switches the check on, built in `folder`; None if this machine has no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "lock_check.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-xc", "-", "-o", library, "-ldl"], input=SOURCE, text=True, check=True
    )
    preload = os.pathsep.join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preload, "PYTHONFAULTHANDLER": "1"}


def crashes(log: list[str]) -> list[str]:
    """The lines of a server's log that tell of a crash."""
    return [line for line in log if any(words in line for words in CRASHES)]


def segfaults(processes: set[int], since: float) -> list[str]:
    """The lines of the kernel's log that tell of a segfault of one of these processes.

    Args:
        since: when the first of them began, as time.monotonic() tells it: numbers of processes are used again.

    Returns:
        Nothing if the log cannot be read.
    """
    log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace").stdout
    found = re.finditer(r"^\[ *([\d.]+)\] .*\[(\d+)\]: segfault.*$", log, re.MULTILINE)
    return [match[0] for match in found if float(match[1]) >= since and int(match[2]) in processes]
