"""Starting and stopping: what keeps a server from starting is named, and a stopped one leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import COMMAND, SERVE, regions

from irminsul_backend.commands.main import main
from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.errors import ServerStartError, UnsupportedModelError
from irminsul_backend.triton_io.server import installation, launcher
from irminsul_backend.triton_io.server.addresses import LOCALHOST, Ports, choose_ports, is_listening, resolve_host
from irminsul_backend.triton_io.server.installation import (
    Installation,
    check_installation,
    environment,
    find_installation,
)
from irminsul_backend.triton_io.server.launcher import Server, check_config, last_words, running_server


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run `irminsul serve` in this process and return the one line with which it refuses to start."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(launcher, "_spawn", lambda *_: pytest.fail("the server was started"))

    def run(*flags: str) -> str:
        assert main([*SERVE, *flags]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("irminsul: ") and err.count("\n") == 1, err
        return err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


class TestHost:
    def test_names_become_addresses(self) -> None:
        """Triton's HTTP server takes a name for 255.255.255.255."""
        assert resolve_host("localhost") == LOCALHOST
        assert resolve_host("0.0.0.0") == "0.0.0.0"


class TestWaiting:
    @pytest.fixture
    def starting(self) -> Iterator[Server]:
        """A server whose gRPC port answers; nothing listens on the HTTP port."""
        with socket.socket() as grpc, socket.socket() as http:
            for one in (grpc, http):
                one.bind((LOCALHOST, 0))
            grpc.listen()
            process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ports = Ports(http.getsockname()[1], grpc.getsockname()[1], 1)
            server = Server(process, LOCALHOST, ports, "irminsul-none-", verbose=False)
            yield server
            server.stop()

    def test_models_are_loaded_but_http_does_not_open(self, starting: Server) -> None:
        words = f"answers on gRPC port {starting.ports.grpc} but is not ready at {starting.http_url}"
        with pytest.raises(ServerStartError, match=words):
            starting.wait_ready(600, http_timeout_s=0.1)

    def test_a_long_wait_is_not_silent(
        self, starting: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(launcher, "PROGRESS_SECONDS", 0.1)
        with pytest.raises(ServerStartError):
            starting.wait_ready(600, http_timeout_s=0.5)
        assert "irminsul: starting" in capsys.readouterr().err


class TestLastWords:
    def test_what_the_supervisor_saw_and_the_last_complaint(self) -> None:
        log = deque(
            [
                "ERROR irminsul: something earlier",
                "CRITICAL irminsul_engine: CUDA error: an illegal memory access",
                "an ordinary line",
                "E1207 11:00:00 NOISE pinned_memory_manager",
                "error: the process of irminsul_engine died; the server ends, start it again",
            ]
        )
        assert last_words(log) == (
            "the process of irminsul_engine died; the server ends, start it again; "
            "CRITICAL irminsul_engine: CUDA error: an illegal memory access"
        )

    def test_it_is_cut(self) -> None:
        assert len(last_words(deque(["ValueError: " + "x" * 10_000]))) == 500

    def test_nothing_was_said(self) -> None:
        assert last_words(deque(["an ordinary line"])) == ""


class TestPorts:
    def test_two_equal_ones(self) -> None:
        with pytest.raises(ServerStartError, match="8000, 8000 must differ"):
            choose_ports(LOCALHOST, Ports(8000, 8000, 0))

    def test_zeros_become_different_free_ports(self) -> None:
        ports = choose_ports(LOCALHOST, Ports())
        assert len({ports.http, ports.grpc, ports.metrics}) == 3
        assert not any(is_listening(LOCALHOST, port) for port in (ports.http, ports.grpc, ports.metrics))

    @pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
    def test_a_port_in_use_is_named_with_its_flag(self, name: str, refuse: Any) -> None:
        with socket.socket() as taken:
            taken.bind((LOCALHOST, 0))
            taken.listen()
            port = taken.getsockname()[1]
            message = refuse(f"--{name}-port={port}")
        assert f"{name} port {port} on 127.0.0.1" in message
        assert f"--{name}-port" in message

    def test_ports_come_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IRMINSUL_HTTP_PORT", "1234")
        monkeypatch.delenv("IRMINSUL_GRPC_PORT", raising=False)
        monkeypatch.delenv("IRMINSUL_METRICS_PORT", raising=False)
        assert Ports.from_env(grpc=8001) == Ports(1234, 8001, 0)
        monkeypatch.setenv("IRMINSUL_HTTP_PORT", "many")
        with pytest.raises(ServerStartError, match="IRMINSUL_HTTP_PORT='many'"):
            Ports.from_env()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the shipped model whose files may be spoilt."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


class TestModelFolders:
    def test_the_shipped_one_is_fine(self) -> None:
        check_config(ServerConfig())

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_missing_file(self, name: str, model: Path) -> None:
        (model / name).unlink()
        with pytest.raises(UnsupportedModelError, match=re.escape(name)):
            check_config(ServerConfig(model=str(model)))

    def test_another_architecture(self, model: Path) -> None:
        """A real process: one clear line and no traceback."""
        values = json.loads((model / "config.json").read_text())
        values |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        (model / "config.json").write_text(json.dumps(values))
        result = subprocess.run([*COMMAND, "--model", str(model)], capture_output=True, text=True)
        assert result.returncode == 1
        assert "LlamaForCausalLM" in result.stderr
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr

    @pytest.mark.server
    def test_weights_that_do_not_fit_are_named_by_the_engine(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This one only the engine sees; its words come through the server's log, and nothing stays behind."""
        values = json.loads((model / "config.json").read_text())
        values["intermediate_size"] *= 2
        (model / "config.json").write_text(json.dumps(values))
        prefixes: list[str] = []

        class Recorded(Server):
            def __init__(self, process: Any, host: str, ports: Ports, shm_prefix: str, verbose: bool) -> None:
                prefixes.append(shm_prefix)
                super().__init__(process, host, ports, shm_prefix, verbose)

        monkeypatch.setattr(launcher, "Server", Recorded)
        with (
            pytest.raises(ServerStartError, match=r"irminsul_engine: .*mlp"),
            running_server(ServerConfig(model=str(model), log_level="WARNING")),
        ):
            pass
        (prefix,) = prefixes
        assert not regions(prefix)


class TestSettings:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--preset=fancy"], ["preset", "fancy", "paper"]),
            (["--session-ttl-s=7200"], ["session_ttl_s", "7200", "3600"]),
            (["--model=/nowhere"], ["/nowhere"]),
            (["--max-batch-tokens=0"], ["max_batch_tokens", "0", "at least 1"]),
            (["--max-running=-1"], ["max_running", "-1", "at least 1"]),
            (["--capacity-tokens=-5"], ["capacity_tokens", "-5"]),
            (["--stream-interval-ms=nan"], ["stream_interval_ms is nan", "finite"]),
            (["--dtype=int8"], ["int8", "bfloat16"]),
            (["--max-running=100000"], ["max_running is 100000", "at most 1024"]),
            (["--max-batch-tokens=1000000000"], ["max_batch_tokens", "at most 131072"]),
            (["--threads=5000"], ["threads", "at most 1024"]),
            (["--drain-s=-1"], ["drain_s is -1", "at least 0"]),
            (["--gpu-memory-fraction=1.5"], ["gpu_memory_fraction is 1.5", "over 0 and at most 1"]),
            (["--host=no-such-host.invalid"], ["'no-such-host.invalid'", "no IPv4 address"]),
            (["--host=::1"], ["'::1'", "no IPv4 address"]),
            (["--host="], ["host is ''", "empty"]),
            (["--http-port=99999"], ["http port 99999", "--http-port"]),
        ],
    )
    def test_a_wrong_flag_is_one_clear_line(self, flags: list[str], words: list[str], refuse: Any) -> None:
        message = refuse(*flags)
        assert all(word in message for word in words), message

    def test_a_wrong_variable(self, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IRMINSUL_CAPACITY_TOKENS", "lots")
        assert "IRMINSUL_CAPACITY_TOKENS='lots'" in refuse()

    def test_a_flag_comes_before_its_variable(self, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IRMINSUL_MAX_RUNNING", "-1")
        assert "max_running is -2" in refuse("--max-running=-2")
        assert "max_running is -1" in refuse()

    def test_a_model_repository_that_is_not_there(self, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IRMINSUL_MODEL_REPOSITORY", "/nowhere")
        assert "/nowhere" in refuse()

    def test_a_variable_out_of_range(self, refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The stubs read the same variables, also under a tritonserver that was started by hand."""
        monkeypatch.setenv("IRMINSUL_MAX_RUNNING", "100000")
        assert "max_running is 100000; it must be at least 1 and at most 1024" in refuse()
        with pytest.raises(ServerStartError, match="max_running is 100000"):
            ServerConfig.from_env()

    def test_help_names_every_setting_and_its_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            main(["serve", "--help"])
        assert end.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        for field in fields(ServerConfig):
            if field.name != "log_level":  # --verbose sets it
                assert "--" + field.name.replace("_", "-") in text
        assert "(default: 0.9)" in text


class TestVariables:
    @pytest.mark.parametrize(("text", "value"), [("on", True), ("True", True), ("1", True), ("YES", True), ("", False)])
    def test_a_switch_that_is_understood(self, text: str, value: bool) -> None:
        assert ServerConfig.from_env({"IRMINSUL_REQUIRE_CACHE_SALT": text}).require_cache_salt is value

    @pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
    def test_a_switch_that_is_off(self, text: str) -> None:
        assert ServerConfig.from_env({"IRMINSUL_REQUIRE_CACHE_SALT": text}).require_cache_salt is False

    @pytest.mark.parametrize("text", ["2", "banana", "tru", "-1"])
    def test_any_other_word_is_refused(self, text: str) -> None:
        with pytest.raises(ServerStartError, match=f"IRMINSUL_REQUIRE_CACHE_SALT='{text}' must be one of 1, true"):
            ServerConfig.from_env({"IRMINSUL_REQUIRE_CACHE_SALT": text})

    @pytest.mark.parametrize("switch", [False, True])
    def test_there_and_back(self, switch: bool) -> None:
        config = ServerConfig(require_cache_salt=switch, device="cuda:1", stream_interval_ms=2.5)
        assert ServerConfig.from_env(config.to_env()) == config

    @pytest.mark.parametrize("name", ["stream_interval_ms", "session_ttl_s", "gpu_memory_fraction"])
    @pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
    def test_numbers_are_finite(self, name: str, text: str) -> None:
        variable = f"IRMINSUL_{name.upper()}"
        with pytest.raises(ServerStartError, match=f"{variable}='{text}' is not a finite number"):
            ServerConfig.from_env({variable: text})
        with pytest.raises(ServerStartError, match=f"{name} is {text}; it must be a finite number"):
            check_config(ServerConfig(**{name: float(text)}))

    @pytest.mark.parametrize("device", ["banana", "", "CPU", "cuda:", "cuda:x", "cpu\n"])
    def test_devices(self, device: str) -> None:
        with pytest.raises(
            ServerStartError, match=re.escape(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
        ):
            check_config(ServerConfig(device=device))

    @pytest.mark.parametrize("capacity", [0, 64])
    def test_the_least_capacity(self, capacity: int) -> None:
        check_config(ServerConfig(device="cpu", capacity_tokens=capacity))
        with pytest.raises(ServerStartError, match=r"capacity_tokens is 63; it must be at least 64 and .*, or 0"):
            check_config(ServerConfig(device="cpu", capacity_tokens=63))


class TestMachine:
    """What the machine lacks is named together with the remedy."""

    def test_this_machine_lacks_nothing(self) -> None:
        found = find_installation()
        check_installation(found, environment(found, dict(os.environ)), 4 << 20)

    def test_a_missing_libpython(self, tmp_path: Path) -> None:
        found = find_installation()
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = (found.backends / "python" / installation.STUB).read_bytes()
        assert f"libpython{version}.so".encode() in stub
        (tmp_path / "python").mkdir()
        broken = tmp_path / "python" / installation.STUB
        broken.write_bytes(
            stub.replace(f"libpython{version}.so".encode(), b"libpython9.9" + b"." * (len(version) - 3) + b".so")
        )
        broken.chmod(0o755)
        libraries = str(Path(installation.__file__).parent)
        with pytest.raises(ServerStartError, match=r"libpython9\.9.* is missing.*apt-get install libpython9"):
            check_installation(Installation(found.binary, tmp_path, True), {"LD_LIBRARY_PATH": libraries}, 1 << 20)

    def test_too_little_shared_memory(self) -> None:
        found = find_installation()
        with pytest.raises(ServerStartError, match=r"/dev/shm has \d+ MiB free.*--shm-size="):
            check_installation(found, environment(found, dict(os.environ)), 1 << 60)

    def test_no_server_at_all(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ServerStartError, match="nvidia-pytriton"):
            find_installation(tmp_path)

    def test_a_server_in_an_image_comes_first(self, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "tritonserver").touch()
        assert find_installation(tmp_path) == Installation(
            tmp_path / "bin" / "tritonserver", tmp_path / "backends", embedded=False
        )


@pytest.mark.server
def test_the_environment_of_a_server_is_its_configuration(server: Server) -> None:
    (child,) = psutil.Process(server.process.pid).children()
    env = child.environ()
    assert ServerConfig.from_env(env) == ServerConfig(log_level="WARNING", threads=1)
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
