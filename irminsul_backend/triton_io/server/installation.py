"""Finds a tritonserver on this machine and says what keeps it from running.

Two places are known: an NGC image's `/opt/tritonserver`, and the server inside the `nvidia-pytriton` package. That one
has no stub beside its Python backend; a private folder in the virtual environment puts the two together.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from irminsul_backend.errors import ServerStartError

NGC_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
SHM = Path("/dev/shm")
PYTHON_MODELS = 4
MIB = 1024 * 1024


@dataclass(frozen=True)
class Installation:
    """A tritonserver that can be started."""

    binary: Path
    backends: Path
    """Holds `python/` with the library, the stub and `triton_python_backend_utils.py`."""
    embedded: bool
    """From the nvidia-pytriton package (2.51), which needs numpy < 2."""


def find_installation(ngc_root: Path = NGC_ROOT) -> Installation:
    """The NGC image's server if there is one, else the embedded one. Raises ServerStartError if there is none."""
    if (ngc_root / "bin" / "tritonserver").is_file():
        return Installation(ngc_root / "bin" / "tritonserver", ngc_root / "backends", embedded=False)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerStartError(
            f"no tritonserver: neither {ngc_root} nor the Python package nvidia-pytriton is here; run 'make setup', "
            "'pip install --no-deps nvidia-pytriton==0.7.0', or use an NGC tritonserver image"
        )
    root = Path(spec.origin).parent / "tritonserver"
    return Installation(root / "bin" / "tritonserver", _embedded_backends(root), embedded=True)


def _embedded_backends(root: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / STUB
    if not stub.is_file():
        raise ServerStartError(f"Python {version} has no stub in nvidia-pytriton; use Python 3.10, 3.11 or 3.12")
    links = {path.name: path for path in (root / "backends" / "python").iterdir() if path.is_file()} | {STUB: stub}
    name = f"{importlib.metadata.version('nvidia-pytriton')}-python{version}"
    for home in (Path(sys.prefix) / "irminsul-triton", Path(tempfile.gettempdir()) / f"irminsul-triton-{os.getuid()}"):
        try:
            return _link(home / name, links)
        except OSError:
            continue  # a read-only environment: the temporary folder comes next
    raise ServerStartError(f"cannot write {sys.prefix} nor {tempfile.gettempdir()}; make one of them writable")


def _link(backends: Path, links: dict[str, Path]) -> Path:
    """Fill `backends`/python with symbolic links; whole or not at all, however many processes do it at once."""
    folder = backends / "python"
    if all((folder / name).is_symlink() and (folder / name).resolve() == path for name, path in links.items()):
        return backends
    backends.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in links.items():
        with tempfile.TemporaryDirectory(dir=backends) as scratch:
            link = Path(scratch) / name
            link.symlink_to(path)
            link.replace(folder / name)
    return backends


def environment(installation: Installation, base: dict[str, str]) -> dict[str, str]:
    """`base` changed so that the stubs find this Python: its packages through PATH, its libpython if it has one."""
    # OpenMP's threads would otherwise spin between two operations and take the cores from the server's other processes.
    env = {"OMP_WAIT_POLICY": "passive", **base}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), base.get("PATH", os.defpath)))
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if installation.embedded and folder and name and name.endswith(".so.1.0") and (Path(folder) / name).is_file():
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (base.get("LD_LIBRARY_PATH"), folder)))
    return env


def check_installation(installation: Installation, env: dict[str, str], max_text_bytes: int) -> None:
    """Raise ServerStartError, with the remedy, for whatever would keep the server from running."""
    if platform.system() != "Linux":
        raise ServerStartError(f"tritonserver runs on Linux, not on {platform.system()}; use Docker")
    _check_libraries(installation, env)
    if installation.embedded:
        _check_numpy()
    _check_shared_memory(max_text_bytes)


def _check_libraries(installation: Installation, env: dict[str, str]) -> None:
    """The dynamic linker itself says what it cannot find."""
    for program in (installation.backends / "python" / STUB, installation.binary):
        try:
            listing = subprocess.run([program], env={**env, "LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True)
        except OSError as error:
            raise ServerStartError(f"{program} does not start: {error}") from error
        text = listing.stdout.decode(errors="replace")
        missing = [line.split()[0] for line in text.splitlines() if "not found" in line]
        for library in missing:
            if library.startswith("libpython"):
                package = library.split(".so")[0]
                raise ServerStartError(
                    f"{library} is missing; Triton's Python backend needs it: apt-get install {package} (Debian, "
                    "Ubuntu), or use a Python that was built with --enable-shared"
                )
        if missing:
            raise ServerStartError(f"{program.name} needs {', '.join(missing)}, which this machine lacks; install it")


def _check_numpy() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise ServerStartError(
            f"numpy {version} is installed; the embedded tritonserver crashes with numpy 2: pip install 'numpy<2'"
        )


def shared_memory_needed(max_text_bytes: int) -> int:
    """Bytes in /dev/shm: a region per Python model, which grows to the largest messages it has held at once."""
    return PYTHON_MODELS * (4 * MIB + 2 * max_text_bytes)


def _check_shared_memory(max_text_bytes: int) -> None:
    needed = shared_memory_needed(max_text_bytes)
    try:
        status = os.statvfs(SHM)
    except OSError as error:
        raise ServerStartError(f"{SHM}: {error.strerror}; Triton's Python models need it") from error
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise ServerStartError(
            f"{SHM} has {free // MIB} MiB free, the server's {PYTHON_MODELS} Python models need {needed // MIB} MiB "
            f"(for prompts up to {max_text_bytes} bytes); in Docker use --shm-size={2 * needed // MIB}m"
        )
