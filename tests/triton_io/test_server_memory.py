"""The memory of the models' processes on a real server: nothing touches it without the interpreter lock, to the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import lock_check, traffic

from irminsul_backend.config import ServerConfig
from irminsul_backend.triton_io.server.addresses import Ports
from irminsul_backend.triton_io.server.launcher import start_server

pytestmark = pytest.mark.server


def test_no_process_crashes_under_every_kind_of_load_nor_at_the_end(
    tmp_path: Path, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = lock_check.variables(tmp_path)
    if variables is None:
        pytest.skip("no C compiler")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server = start_server(ServerConfig(model=str(one_layer), log_level="WARNING", threads=1), ports=Ports())
    try:
        counts, failures = traffic.run(server, traffic.CLIENTS, seconds=5)
    finally:
        server.stop()
    assert lock_check.crashes(list(server.log)) == []
    assert failures == []
    assert set(counts) == {client.__name__ for client in traffic.CLIENTS}
