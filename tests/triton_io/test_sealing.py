"""The seal of packets between our models, and the secret behind it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import InvalidRequestError, ServerStartError
from irminsul_backend.triton_io import sealing
from irminsul_backend.triton_io.sealing import SEAL_BYTES, seal, shared_secret, unseal
from irminsul_backend.triton_io.tensors import PLAN_TENSORS

INT32 = st.integers(-(2**31), 2**31 - 1)
PLANS = st.fixed_dictionaries(
    {
        "token_ids": st.lists(INT32, max_size=5),
        "chunk_ends": st.lists(INT32, max_size=5),
        "fingerprints": st.lists(st.integers(0, 2**64 - 1), max_size=3),
        "request": st.binary(max_size=20),
    }
)


def received(sealed: dict[str, Any]) -> dict[str, Any]:
    """What the other model reads: numbers without the batch axis."""
    return {name: value if isinstance(value, bytes) else value[0] for name, value in sealed.items()}


class TestSeal:
    @given(PLANS)
    def test_what_was_sealed_is_read(self, plan: dict[str, Any]) -> None:
        opened = unseal(PLAN_TENSORS, received(seal(PLAN_TENSORS, plan)))
        assert {name: value if isinstance(value, bytes) else value.tolist() for name, value in opened.items()} == plan

    @given(PLANS, PLANS)
    def test_a_seal_fits_no_other_packet(self, plan: dict[str, Any], other: dict[str, Any]) -> None:
        """Nor one with the same bytes in other tensors."""
        sealed, changed = received(seal(PLAN_TENSORS, plan)), received(seal(PLAN_TENSORS, other))
        changed["request"] = sealed["request"][:SEAL_BYTES] + changed["request"][SEAL_BYTES:]
        if plan == other:
            unseal(PLAN_TENSORS, changed)
        else:
            with pytest.raises(InvalidRequestError, match="request does not come from this server"):
                unseal(PLAN_TENSORS, changed)

    @given(PLANS, st.binary(max_size=40))
    def test_no_client_can_make_one_up(self, plan: dict[str, Any], packet: bytes) -> None:
        with pytest.raises(InvalidRequestError):
            unseal(PLAN_TENSORS, {**received(seal(PLAN_TENSORS, plan)), "request": packet})

    def test_another_server_has_another_seal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = {"token_ids": [1], "chunk_ends": [1], "fingerprints": [1], "request": b"{}"}
        sealed = received(seal(PLAN_TENSORS, plan))
        monkeypatch.setattr(sealing, "secret", lambda: b"another" * 4)
        with pytest.raises(InvalidRequestError):
            unseal(PLAN_TENSORS, sealed)

    def test_a_tensor_of_another_type_is_refused(self) -> None:
        plan = {"token_ids": [], "chunk_ends": [1], "fingerprints": [1], "request": b"{}"}
        sealed = received(seal(PLAN_TENSORS, plan))
        with pytest.raises(InvalidRequestError):
            unseal(PLAN_TENSORS, {**sealed, "token_ids": np.zeros(1, np.int32)})


class TestSecret:
    @pytest.fixture
    def read(self) -> Iterator[Any]:
        sealing.secret.cache_clear()
        yield sealing.secret
        sealing.secret.cache_clear()

    def test_the_environment_comes_first(self, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(sealing.SECRET_VARIABLE, "ab" * 32)
        assert read() == b"\xab" * 32

    @pytest.mark.parametrize("text", ["secret", "ab" * 15, "ab" * 65])
    def test_what_is_no_secret_is_refused(self, text: str, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(sealing.SECRET_VARIABLE, text)
        with pytest.raises(ServerStartError, match="16 to 64 bytes"):
            read()

    def test_all_processes_of_one_server_share_one_and_nobody_else_reads_it(self, tmp_path: Path) -> None:
        code = (
            "import os, sys, pathlib; from irminsul_backend.triton_io.sealing import shared_secret;"
            "print(shared_secret(os.getppid(), pathlib.Path(sys.argv[1])))"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        stubs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        secrets = {stub.communicate()[0].strip() for stub in stubs}
        assert secrets == {shared_secret(os.getpid(), tmp_path)}
        assert len(secrets.pop()) == 64
        (file,) = tmp_path.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_the_secrets_of_servers_that_are_gone_are_removed(self, tmp_path: Path) -> None:
        gone = subprocess.Popen(["sleep", "60"])
        first = shared_secret(gone.pid, tmp_path)
        gone.kill()
        gone.wait()
        assert shared_secret(os.getpid(), tmp_path) != first
        assert [path.name.split("-")[2] for path in tmp_path.iterdir()] == [str(os.getpid())]

    def test_a_process_of_the_same_id_has_another(self, tmp_path: Path) -> None:
        stranger = tmp_path / f"{sealing.PREFIX}{os.getpid()}-1"
        stranger.write_text("00" * 32)
        assert shared_secret(os.getpid(), tmp_path) != "00" * 32
        assert not stranger.exists()

    @pytest.mark.parametrize("form", ["open to all", "a link"])
    def test_a_file_that_somebody_else_put_there_is_not_taken(self, form: str, tmp_path: Path) -> None:
        folder = tmp_path / "shm"
        folder.mkdir()
        shared_secret(os.getpid(), folder)
        (path,) = folder.iterdir()
        if form == "a link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        else:
            path.chmod(0o644)
        with pytest.raises((ServerStartError, OSError)):
            shared_secret(os.getpid(), folder)
