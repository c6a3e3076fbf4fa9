"""Ending a server, in order and by force: who is answered, what the exit code says, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from irminsul_client import Client, IrminsulClientError
from serving import Serving, regions

from irminsul_backend.triton_io.server.leftovers import remove_leftovers

pytestmark = pytest.mark.server


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    """Starts `irminsul serve` with flags; what is left of it after the test is killed."""
    started: list[Serving] = []

    def start(*flags: str) -> Serving:
        started.append(Serving(*flags))
        return started[-1]

    yield start
    for serving in started:
        serving.process.kill()
        serving.process.communicate()


class Streaming:
    """A stream that runs on a thread of its own."""

    def __init__(self, serving: Serving, max_tokens: int) -> None:
        self.tokens = 0
        self.error = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(serving.grpc_url, max_tokens), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the client waits for ever"

    def _run(self, url: str, max_tokens: int) -> None:
        try:
            with Client(url) as client:
                for chunk in client.stream(text="Once", max_tokens=max_tokens, ignore_eos=True):
                    self.tokens += len(chunk.token_ids)
                    if self.tokens:
                        self._started.set()
        except IrminsulClientError as error:
            self.error = str(error)
        finally:
            self._started.set()


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_while_a_session_is_open(self, number: signal.Signals, serve: Any, connect: Any) -> None:
        serving = serve()
        assert regions(serving.prefix)
        assert not connect(serving).ask(session="open", start=True, end=False, text_input="a", max_tokens=1).error
        serving.process.send_signal(number)
        out, err = serving.process.communicate(timeout=60)
        assert serving.process.returncode == 0
        assert (out, err) == ("", "")  # the one line when ready was all there was to say
        serving.assert_nothing_left()

    def test_running_requests_finish_and_new_ones_are_refused(self, serve: Any) -> None:
        serving = serve()
        streaming = Streaming(serving, max_tokens=300)
        with Client(serving.grpc_url) as client:
            assert client.generate(text="a", max_tokens=1).token_ids  # its connection is there before the drain
            serving.process.send_signal(signal.SIGTERM)
            serving.wait_not_ready()
            with pytest.raises(IrminsulClientError, match="the server is shutting down"):
                while True:  # the engine hears of it a little later than the port
                    client.generate(text="a", max_tokens=1)
        streaming.join()
        assert (streaming.tokens, streaming.error) == (300, "")
        _, err = serving.process.communicate(timeout=60)
        assert (serving.process.returncode, err) == (0, "")
        serving.assert_nothing_left()

    def test_requests_that_outlast_the_grace_time_are_told(self, serve: Any) -> None:
        serving = serve("--drain-s=0.2")
        streaming = Streaming(serving, max_tokens=20_000)
        serving.process.send_signal(signal.SIGTERM)
        streaming.join()
        assert "the server is shutting down" in streaming.error
        _, err = serving.process.communicate(timeout=60)
        assert serving.process.returncode == 3
        assert err == "irminsul: running requests were cut off (drain_s is 0.2)\n"
        serving.assert_nothing_left()

    def test_a_second_signal_ends_it_at_once(self, serve: Any) -> None:
        serving = serve("--drain-s=3600")
        streaming = Streaming(serving, max_tokens=20_000)
        serving.process.send_signal(signal.SIGTERM)
        serving.wait_not_ready()
        serving.process.send_signal(signal.SIGTERM)
        streaming.join()
        assert streaming.error
        _, err = serving.process.communicate(timeout=60)
        assert serving.process.returncode == 3
        assert "cut off (at the second signal)" in err
        serving.assert_nothing_left()


class TestKills:
    """Whichever process is killed: not ready any more, no client waits for ever, nothing stays."""

    @pytest.mark.parametrize("name", ["launcher", "supervisor", "tritonserver", "irminsul_engine", "irminsul_unary"])
    def test_one_process(self, name: str, serve: Any) -> None:
        serving = serve()
        streaming = Streaming(serving, max_tokens=20_000)
        serving.find(name).kill()
        serving.wait_not_ready()
        streaming.join()
        assert streaming.error
        _, err = serving.process.communicate(timeout=60)
        if name != "launcher":
            assert serving.process.returncode == 1
            assert "the server ended by itself" in err
        if name.startswith("irminsul"):
            assert f"the process of {name} died" in err.splitlines()[-1]
        serving.assert_nothing_left()

    def test_launcher_and_supervisor_at_once(self, serve: Any) -> None:
        """Nobody is left who could remove the regions: the next start does. Another server's are left alone."""
        other, serving = serve(), serve()
        streaming = Streaming(serving, max_tokens=20_000)
        os.kill(serving.supervisor.pid, signal.SIGSTOP)  # else it might see the launcher die
        serving.find("launcher").kill()
        serving.supervisor.kill()
        serving.wait_not_ready()
        streaming.join()
        assert regions(serving.prefix)
        kept = regions(other.prefix)
        remove_leftovers()  # what a start does first
        serving.assert_nothing_left()
        assert regions(other.prefix) == kept
        with Client(other.grpc_url) as client:
            assert client.generate(text="a", max_tokens=1).token_ids
