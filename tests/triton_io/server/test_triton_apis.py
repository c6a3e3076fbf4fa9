"""Which of Triton's APIs a client reaches."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from typing import Any

import pytest
from serving import Serving
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from irminsul_backend.triton_io.server.launcher import Server

pytestmark = pytest.mark.server

CLOSED = [
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/irminsul/trace/setting"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/irminsul/load"),
    ("POST", "/v2/repository/models/irminsul/unload"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/irminsul/stats"),
]
OPEN = ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/irminsul", "/v2/models/irminsul/config"]


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_closed_over_http(method: str, path: str, server: Server) -> None:
    connection = http.client.HTTPConnection(server.host, server.ports.http, timeout=10)
    connection.request(method, path, body="{}" if method == "POST" else None)
    response = connection.getresponse()
    assert response.status == 403
    assert b"restricted" in response.read()


@pytest.mark.parametrize("path", OPEN)
def test_open_over_http(path: str, server: Server) -> None:
    connection = http.client.HTTPConnection(server.host, server.ports.http, timeout=10)
    connection.request("GET", path)
    assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_log_settings(),
        lambda client: client.update_log_settings({"log_file": "/tmp/x"}),
        lambda client: client.get_trace_settings(),
        lambda client: client.get_system_shared_memory_status(),
        lambda client: client.register_system_shared_memory("a", "/a", 8),
        lambda client: client.get_cuda_shared_memory_status(),
        lambda client: client.get_model_repository_index(),
        lambda client: client.load_model("irminsul"),
        lambda client: client.unload_model("irminsul"),
        lambda client: client.get_inference_statistics(),
    ],
)
def test_closed_over_grpc(call: Callable[[Any], Any], server: Server) -> None:
    with InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException, match="restricted"):
        call(client)


def test_open_over_grpc(server: Server) -> None:
    with InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready()
        assert client.get_server_metadata().version
        assert client.get_model_metadata("irminsul").inputs
        assert client.get_model_config("irminsul").config.name == "irminsul"


def test_all_are_open_where_that_is_asked_for(connect: Any) -> None:
    """On a server that is named by `localhost`, which works as its address does."""
    serving = Serving("--open-triton-apis", "--host=localhost")
    try:
        assert serving.is_ready()
        for path in ("/v2/logging", "/v2/systemsharedmemory/status", "/v2/models/stats", "/v2/trace/setting"):
            assert serving.status("GET", path) == 200
        assert not connect(serving).ask(text_input="a", max_tokens=1).error
    finally:
        serving.process.terminate()
        serving.process.communicate(timeout=60)
