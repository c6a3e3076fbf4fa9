"""A request that raises fails alone, wherever it raises; an engine that cannot go on ends, and says why."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from irminsul_backend.cache import PICache
from irminsul_backend.chunking import PRESETS
from irminsul_backend.engine import Engine
from irminsul_backend.engine.faults import MAX_CONSECUTIVE_FAULTS, Faults, is_device_error
from irminsul_backend.engine.running_sequence import RunningSequence
from irminsul_backend.engine.scheduler import Scheduler
from irminsul_backend.errors import UnavailableError
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

Text = Callable[[int], np.ndarray]
BAD = "the one at fault"


def fail_for_bad(monkeypatch, owner: type, name: str, session_of: Callable) -> None:
    """Let a method raise whenever it is called for the session BAD."""
    real = getattr(owner, name)

    def broken(self, *args, **kwargs):
        if session_of(self, *args, **kwargs) == BAD:
            raise RuntimeError("no such thing")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


PLACES = {
    "admission": (PICache, "admit", lambda self, *args, session_id, **more: session_id),
    "planning the step": (RunningSequence, "next_piece", lambda self, budget: self.request.session_id),
    "advancing": (PICache, "advance", lambda self, sequence, length: sequence.session_id),
    "growing": (PICache, "reserve", lambda self, sequence, n=1: sequence.session_id),
    "appending": (PICache, "append", lambda self, sequence, token: sequence.session_id),
    "retiring": (PICache, "retire", lambda self, sequence: sequence.session_id),
    "usage": (RunningSequence, "usage", lambda self: self.request.session_id),
    "charging": (Scheduler, "charge", lambda self, sequence, tokens: sequence.request.session_id),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_raises_fails_alone(harness, text: Text, monkeypatch, place: str) -> None:
    """Others that run beside it, and those that come later, get what they would have got."""
    served, prompt, later = harness("deep", max_running=3), text(200), text(90)
    expected = served.run(prompt, max_tokens=40, salt="alone"), served.run(later, "off", max_tokens=8)
    owner, name, session_of = PLACES[place]
    fail_for_bad(monkeypatch, owner, name, session_of)
    good = served.submit(prompt, max_tokens=40)
    while not any(e.kind == "tokens" for e in good.events):
        pass
    bad = [served.submit(text(60), max_tokens=8, session=BAD, salt="bad") for _ in range(2)]
    assert good.result().tokens == expected[0].tokens
    for one in bad:
        assert one.done.wait(60)
        assert one.events[-1].error == "internal error: RuntimeError: no such thing"
        assert [e.index for e in one.events] == list(range(len(one.events)))
    assert served.run(later, "off", max_tokens=8).tokens == expected[1].tokens
    counters = served.status()["counters"]
    assert counters["faults"] == counters["failed"] == 2
    assert not served.engine.failure


def test_cancelling_that_raises_ends_the_request(harness, text: Text, monkeypatch) -> None:
    served = harness("one")
    fail_for_bad(monkeypatch, PICache, "retire", lambda self, sequence: sequence.session_id)
    bad = served.submit(text(30), max_tokens=5000, session=BAD)
    good = served.submit(text(30), max_tokens=100)
    while not any(e.kind == "tokens" for e in bad.events):
        pass
    served.engine.stop(bad.key)
    assert bad.done.wait(60) and "no such thing" in bad.events[-1].error
    assert len(good.result().tokens) == 100


@pytest.mark.parametrize("kind", ["admitted", "progress", "tokens", "finished"])
def test_a_receiver_that_raises_loses_its_request_only(harness, text: Text, kind: str) -> None:
    served = harness("one", max_batch_tokens=64)
    kinds: list[str] = []

    def on_event(event) -> None:
        kinds.append(event.kind)
        if event.kind == kind:
            raise ValueError("gone")

    good = served.submit(text(30), max_tokens=60)
    served.submit(text(200), max_tokens=8, on_event=on_event)
    assert len(good.result().tokens) == 60
    served.run(text(30))
    assert kinds[-1] == ("finished" if kind == "finished" else "error") and kinds.count(kind) == 1
    counters = served.status()["counters"]
    assert counters["undeliverable"] == 1 and "cache_resets" not in counters
    assert not served.engine.failure


class Failing:
    """An engine whose forward pass fails as told; collects what on_fatal was given."""

    def __init__(self, models, error: Exception, device_lost: bool = False) -> None:
        self.reasons: list[str] = []
        self.ended = threading.Event()
        self.events: list = []
        self.engine = Engine(models["one"], 4096, PRESETS["default"], on_fatal=self.on_fatal)

        def forward(pieces, base):
            raise error

        def check() -> None:
            if device_lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        self.engine.runner.forward = forward
        self.engine._core.faults._check_device = check
        self.engine.start()

    def on_fatal(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()

    def submit(self, key: str) -> threading.Event:
        done = threading.Event()

        def on_event(event) -> None:
            self.events.append(event)
            if event.kind in ("finished", "error"):
                done.set()

        request = GenerationRequest(key=key, sampling=SamplingParams(max_tokens=3))
        arrays = np.arange(20, dtype=np.int32), np.array([20], np.int32), np.zeros(1, np.uint64)
        self.engine.submit(request, *arrays, on_event)
        return done


class TestTheEnd:
    def test_steps_that_keep_failing(self, models, caplog) -> None:
        failing = Failing(models, RuntimeError("no kernel image"))
        for i in range(MAX_CONSECUTIVE_FAULTS):
            assert not failing.engine.failure
            assert failing.submit(str(i)).wait(30)
        assert failing.ended.wait(30)
        assert failing.reasons == [f"{MAX_CONSECUTIVE_FAULTS} steps in a row failed"] == [failing.engine.failure]
        assert failing.engine.snapshot().state == "failed"
        with pytest.raises(UnavailableError, match="has failed"):
            failing.submit("late")
        with pytest.raises(UnavailableError, match="has failed"):
            failing.engine.status()
        assert not failing.engine.stop("0")
        failing.engine.close()
        assert sum("a forward pass failed" in r.message for r in caplog.records) == 1, "the same fault is logged once"

    def test_a_lost_device(self, models) -> None:
        """One error of it is enough; those who wait are told first."""
        failing = Failing(models, RuntimeError("CUDA error: device-side assert triggered"), device_lost=True)
        assert failing.submit("a").wait(30)
        assert failing.ended.wait(30)
        assert "illegal memory access" in failing.engine.failure
        assert failing.events[-1].kind == "error"
        failing.engine.close()

    def test_a_device_error_that_passes(self, models) -> None:
        failing = Failing(models, RuntimeError("CUDA error: out of memory"))
        assert failing.submit("a").wait(30)
        assert not failing.engine.failure
        failing.engine.close()

    def test_a_defect_of_the_loop_itself(self, models, monkeypatch) -> None:
        failing = Failing(models, RuntimeError("unused"))

        def broken() -> None:
            raise SystemError("a defect")

        monkeypatch.setattr(failing.engine._core, "step", broken)
        assert failing.submit("a").wait(30)
        assert failing.events[-1].error == "the engine has failed: SystemError: a defect"
        assert failing.ended.wait(30)
        failing.engine.close()


def test_a_good_step_forgives() -> None:
    faults = Faults(lambda: None)
    for _ in range(10):
        for _ in range(MAX_CONSECUTIVE_FAULTS - 1):
            faults.step_ended(progress=False, faulty=True)
        faults.step_ended(progress=True, faulty=True)
        faults.step_ended(progress=False, faulty=False)
    assert not faults.fatal


def test_which_errors_ask_for_a_look_at_the_device() -> None:
    assert is_device_error(RuntimeError("CUDA error: unspecified launch failure"))
    assert not is_device_error(RuntimeError("shapes do not match"))
    assert not is_device_error(torch.OutOfMemoryError("CUDA out of memory"))
