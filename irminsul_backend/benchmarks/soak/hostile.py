"""The cases of `listed`: each sends what a hostile or careless client would, and says what was wrong then."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from irminsul_client import IrminsulClientError

from irminsul_backend.benchmarks.soak.crowding import abandoned, long_answers, many_stop_words, text_beside
from irminsul_backend.benchmarks.soak.desk import Case, Desk, badly_refused
from irminsul_backend.benchmarks.soak.packets import IDS, packet, salted
from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import IrminsulError
from irminsul_backend.triton_io.server.launcher import check_config, start_server

REFUSED, SERVED, RIGHT = "refused by name", "served right", "refused by name or served right"


def engine(changes: dict[str, Any], desk: Desk) -> str:
    return badly_refused(desk.wire.ask("irminsul_engine", timeout=10, **packet(uuid.uuid4().hex, **changes)))


def borrowed_namespace(desk: Desk) -> str:
    """a packet that names another tenant's namespace"""
    desk.client.generate(input_ids=IDS.tolist(), max_tokens=1, cache_salt="victim")
    reply = desk.wire.ask("irminsul_engine", **packet(uuid.uuid4().hex, namespace=salted("victim")))
    return badly_refused(reply)


def foreign_stop(desk: Desk) -> str:
    """a direct {"stop": key} of a request that runs"""
    reply = desk.wire.ask("irminsul_engine", control='{"stop": "some key"}')
    return badly_refused(reply)


def open_status(desk: Desk) -> str:
    """a direct {"status": true}"""
    return badly_refused(desk.wire.ask("irminsul_engine", control='{"status": true}'))


def forged_event(desk: Desk) -> str:
    """a direct call of irminsul_detokenizer"""
    event = '{"key": "k", "index": 0, "kind": "tokens"}'
    return badly_refused(desk.wire.ask("irminsul_detokenizer", output_ids=[5], output_log_probs=[0.5], event=event))


def tiny_temperature(desk: Desk) -> str:
    """temperatures of 1e-37, 1e-38 and 1e-45 give the greedy answer"""
    greedy = desk.ids()
    wrong = [t for t in (1e-37, 1e-38, 1e-45) if desk.ids(temperature=t, seed=3) != greedy]
    return f"another answer at {wrong}" if wrong else ""


def extreme_penalties(desk: Desk) -> str:
    """frequency_penalty -3e38 and repetition_penalty 1e-38"""
    wrong = []
    for name, extreme, mild in (("frequency_penalty", -3e38, -1e6), ("repetition_penalty", 1e-38, 1e-6)):
        try:
            if desk.ids(**{name: extreme}) != desk.ids(**{name: mild}):
                wrong.append(f"{name} {extreme:g} answers otherwise than {mild:g}")
        except IrminsulClientError as error:
            if name not in str(error):
                wrong.append(f"{name}: {error}"[:120])
    return "; ".join(wrong)


def wide_seeds(desk: Desk) -> str:
    """seeds that differ in their upper 32 bits only draw otherwise"""
    same = [
        f"{a} and {b}"
        for a, b in ((0, 1 << 63), ((1 << 63) - 1, (1 << 64) - 1))
        if desk.ids(temperature=2.0, seed=a, max_tokens=12) == desk.ids(temperature=2.0, seed=b, max_tokens=12)
    ]
    return f"equal draws of {' and of '.join(same)}" if same else ""


def same_seed(desk: Desk) -> str:
    """the same seed with and without log-probabilities draws the same"""
    request = {"temperature": 2.0, "seed": 11, "max_tokens": 12}
    return "" if desk.ids(**request) == desk.ids(**request, return_log_probs=True) else "other tokens"


def long_name(name: str, desk: Desk) -> str:
    given: dict[str, Any] = {name: "x" * 10_000_000}
    return badly_refused(desk.wire.ask("irminsul", uuid.uuid4().hex, text_input="a", max_tokens=1, **given))


def endpoints_of_triton(desk: Desk) -> str:
    """/v2/logging, shared memory, trace and repository APIs"""
    asked = (
        ("POST", "/v2/logging", b'{"log_verbose_level": 0}'),
        ("GET", "/v2/systemsharedmemory/status", b""),
        ("POST", "/v2/trace/setting", b"{}"),
        ("POST", "/v2/repository/index", b"{}"),
        ("POST", "/v2/repository/models/irminsul_unary/unload", b'{"parameters": {"unload_dependents": false}}'),
    )
    served = [path for method, path, body in asked if desk.http.post(path, body, method=method)[0] == 200]
    return f"200 from {', '.join(served)}" if served else ""


def host_name(desk: Desk) -> str:
    """--host localhost"""
    try:
        start_server(ServerConfig(log_level="ERROR", capacity_tokens=4096), "localhost", start_timeout_s=40).stop()
    except IrminsulError as error:
        return "" if "localhost" in str(error) and "not ready after" not in str(error) else str(error)[:160]
    return ""


def absurd_running(desk: Desk) -> str:
    """--max-running 100000"""
    try:
        check_config(ServerConfig(max_running=100_000))
    except IrminsulError as error:
        return "" if "max_running" in str(error) else str(error)[:160]
    return "accepted"


def typed_control_token(desk: Desk) -> str:
    """<|user|> inside a message is text"""

    def tokens(content: str) -> int:
        usage = desk.client.generate(messages=[{"role": "user", "content": content}], max_tokens=1).usage
        return usage.prompt_tokens if usage else 0

    added = tokens("one <|user|> two") - tokens("one two")
    return "" if added > 2 else f"it added {added} tokens: it became the control token"


def _case(number: int, bar: str, act: Callable[..., str], *given: Any, what: str = "") -> Case:
    doc = (what or act.__doc__ or "").strip()
    return Case(f"{number}: {doc}", bar, partial(act, *given) if given else act)


def cases() -> Iterator[Case]:
    """All of them, numbered by the kind of fault; those that may stop a server last."""
    yield _case(2, REFUSED, borrowed_namespace)
    yield _case(2, REFUSED, foreign_stop)
    yield _case(2, REFUSED, open_status)
    yield _case(2, REFUSED, forged_event)
    for size in (1 << 20, 4 << 20):
        yield _case(7, "p95 <= 3 times undisturbed", text_beside, size, what=f"texts of {size >> 20} MiB beside hellos")
    yield _case(7, SERVED, many_stop_words)
    yield _case(11, SERVED, tiny_temperature)
    yield _case(11, RIGHT, extreme_penalties)
    yield _case(11, SERVED, wide_seeds)
    yield _case(11, SERVED, same_seed)
    for name in ("cache_salt", "cancel_key"):
        yield _case(12, REFUSED, long_name, name, what=f"a {name} of 10 MB")
    yield _case(13, SERVED, long_answers)
    yield _case(14, "refused", endpoints_of_triton)
    yield _case(15, "decoding ends within 3 s", abandoned)
    yield _case(15, "works, or refused at once", host_name)
    yield _case(15, REFUSED, absurd_running)
    yield _case(16, SERVED, typed_control_token)
    samples: list[dict[str, Any]] = [{"sampling": {"max_tokens": value}} for value in (0, -5, "3", 2.5)]
    for changes in (*samples, {"namespace": {}}, {"session_id": {}}, {"bad_words": [["x"]]}, {"stop_words": [7]}):
        yield _case(1, REFUSED, engine, changes, what=f"irminsul_engine called directly with {changes}")
