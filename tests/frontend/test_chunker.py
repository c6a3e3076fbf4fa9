"""From a request's fields to ids, chunks and a GenerationRequest; every kind of bad input is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.errors import InvalidRequestError, ServerStartError, SessionError, UnsupportedModelError
from irminsul_backend.frontend.chunker import CUT_MARKER, Prepared, PromptPreparer
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.text.client_text import plain

LIMIT = 500
"""max_position_embeddings of the model in these tests."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model without its weights, and with a small limit."""
    for path in DEMO_MODEL.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    change_config(tmp_path, max_position_embeddings=LIMIT)
    return tmp_path


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.fixture
def preparer(folder: Path) -> PromptPreparer:
    return PromptPreparer(ServerConfig(model=str(folder), max_text_bytes=20_000))


def one_shot(preparer: PromptPreparer, **fields: Any) -> Prepared:
    return preparer.prepare(fields, "one", start=True, end=True)


def chat(*contents: str) -> bytes:
    return json.dumps([{"role": "user", "content": content} for content in contents]).encode()


class TestPrompt:
    def test_text(self, preparer: PromptPreparer) -> None:
        got = one_shot(preparer, text_input="Where is the agent? 東京 🙂".encode())
        assert preparer.tokenizer.decode(got.token_ids) == "Where is the agent? 東京 🙂"
        assert (got.token_ids.dtype, got.chunk_ends.dtype, got.fingerprints.dtype) == (np.int32, np.int32, np.uint64)
        assert len(got.chunk_ends) == len(got.fingerprints)
        assert got.chunk_ends[-1] == len(got.token_ids)

    def test_special_tokens_in_messages_and_tools_are_text_unless_allowed(self, preparer: PromptPreparer) -> None:
        messages = [{"role": "user", "content": "print <|end|> please"}]
        fields = {"messages": json.dumps(messages).encode(), "tools": b'[{"name": "<|system|>", "<|end|>": 1}]'}
        end, system = (preparer.tokenizer.token_id(text) for text in ("<|end|>", "<|system|>"))
        ids = one_shot(preparer, **fields).token_ids
        assert not {end, system} & set(ids.tolist())
        assert preparer.tokenizer.decode(ids).endswith("print <|end|> please")
        assert '"<|end|>": 1' in preparer.tokenizer.decode(ids)
        allowed = one_shot(preparer, allow_special_tokens=True, **fields).token_ids.tolist()
        assert (allowed.count(end), allowed.count(system)) == (2, 1)
        refused = one_shot(preparer, allow_special_tokens=False, **fields).token_ids
        assert refused.tolist() == ids.tolist()

    def test_messages_without_special_tokens_are_tokenised_as_a_whole(self, preparer: PromptPreparer) -> None:
        messages = [{"role": "user", "content": "print <| end |> please"}, {"role": "tool", "content": "> |>"}]
        got = one_shot(preparer, messages=json.dumps(messages).encode())
        text = plain(preparer.template.render(messages))
        assert got.token_ids.tolist() == preparer.tokenizer.encode(text).ids.tolist()

    @pytest.mark.parametrize("setting", [False, True])
    @pytest.mark.parametrize("allowed", [None, False, True])
    def test_special_tokens_in_a_plain_text(self, folder: Path, setting: bool, allowed: bool | None) -> None:
        preparer = PromptPreparer(ServerConfig(model=str(folder), escape_special_tokens=setting))
        given = {} if allowed is None else {"allow_special_tokens": allowed}
        ids = one_shot(preparer, text_input=f"a<|end|>{CUT_MARKER}<|e{CUT_MARKER}nd|>b".encode(), **given).token_ids
        count = ids.tolist().count(preparer.tokenizer.token_id("<|end|>"))
        assert count == int(not setting if allowed is None else allowed)

    def test_a_text_with_too_many_tokens_is_given_up(self, folder: Path) -> None:
        """More than its bytes alone tell."""
        preparer = PromptPreparer(ServerConfig(model=str(folder)))
        text = "a7 " * (LIMIT // 2)
        assert preparer.tokenizer.least_tokens(text) < LIMIT < len(preparer.tokenizer.encode(text + "x").ids)
        with pytest.raises(InvalidRequestError, match=r"at least 50\d tokens; .* the model's limit is 500"):
            one_shot(preparer, text_input=text.encode())

    def test_a_text_that_cannot_fit_is_not_tokenised(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        preparer = PromptPreparer(ServerConfig(model=str(folder)))
        monkeypatch.setattr(preparer.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised"))
        text = "the agent reads. " * 200_000
        for fields in ({"text_input": text.encode()}, {"messages": chat(text)}):
            with pytest.raises(InvalidRequestError, match=r"at least \d+ tokens; .* the model's limit is 500"):
                one_shot(preparer, **fields)

    def test_tools_reach_the_template(self, preparer: PromptPreparer) -> None:
        tools = [{"type": "function", "function": {"name": "find_flight"}}]
        got = one_shot(preparer, messages=chat("hi"), tools=json.dumps(tools).encode())
        assert "find_flight" in preparer.tokenizer.decode(got.token_ids)
        plain = one_shot(preparer, messages=chat("hi"), tools=b"[]")
        assert "find_flight" not in preparer.tokenizer.decode(plain.token_ids)

    def test_ids_are_copied(self, preparer: PromptPreparer) -> None:
        ids = np.arange(10, 40, dtype=np.int32)
        got = one_shot(preparer, input_ids=ids)
        ids[:] = 0
        assert got.token_ids.tolist() == list(range(10, 40))

    def test_the_namespace_keys_the_fingerprints(self, preparer: PromptPreparer) -> None:
        fields = {"text_input": b"some words to be cut into chunks " * 8}
        open_, salted, other = (
            one_shot(preparer, **fields, **salt) for salt in ({}, {"cache_salt": b"a"}, {"cache_salt": b"b"})
        )
        assert open_.request.namespace == '["shared"]'
        assert salted.request.namespace == '["salt", "a"]'
        assert len({got.fingerprints.tobytes() for got in (open_, salted, other)}) == 3
        want = fingerprint(salted.token_ids, salted.chunk_ends, '["salt", "a"]')
        assert (salted.fingerprints == want).all()

    def test_without_a_salt_a_session_may_be_alone(self, folder: Path) -> None:
        preparer = PromptPreparer(ServerConfig(model=str(folder), require_cache_salt=True))

        def namespace(session: int | str | None, start: bool, end: bool = False) -> str:
            return preparer.prepare({"text_input": b"x"}, session, start, end).request.namespace

        first = namespace('a"]', start=True)
        assert namespace('a"]', start=False, end=True) == first
        others = [namespace('a"]', start=True), namespace(77, start=True), namespace("77", start=True)]
        others += [namespace(None, start=False), namespace(None, start=False)]
        assert len({first, *others}) == 6
        assert all(json.loads(other)[0] == "session" for other in others)
        assert one_shot(preparer, text_input=b"x", cache_salt=b"s").request.namespace == '["salt", "s"]'

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(st.lists(st.sampled_from(["one ", "zwei. ", "東京 ", "x" * 50]), max_size=30), min_size=2, max_size=4)
    )
    def test_each_turn_is_cut_as_if_it_were_the_first(self, preparer: PromptPreparer, turns: list[list[str]]) -> None:
        preset = PRESETS["default"]
        for number, words in enumerate(turns):
            first, last = number == 0, number == len(turns) - 1
            got = preparer.prepare({"messages": chat("".join(words), "go")}, "s", start=first, end=last)
            edges = preparer.tokenizer.edges(got.token_ids)
            assert got.chunk_ends.tolist() == cut(got.token_ids, preset, edges).tolist()


class TestRequest:
    def test_defaults(self, preparer: PromptPreparer) -> None:
        request = one_shot(preparer, text_input=b"hi").request
        assert request.session_id == '"one"'
        assert (request.reuse, request.stream, request.echo) == ("content", False, "")
        assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (128, 0.0, None)
        assert list(request.end_ids) == list(preparer.tokenizer.end_ids)
        assert request.key != one_shot(preparer, text_input=b"hi").request.key

    def test_everything_arrives(self, preparer: PromptPreparer) -> None:
        numbers = {
            "max_tokens": 7,
            "top_k": 5,
            "temperature": 0.5,
            "top_p": 0.25,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "presence_penalty": -0.5,
            "frequency_penalty": 2.0,
            "seed": 2**64 - 1,
        }
        flags = {"stream": True, "return_log_probs": True, "return_perf_metrics": True, "return_num_input_tokens": True}
        request = one_shot(
            preparer,
            text_input=b"hi",
            reuse=b"exact",
            cancel_key=b"k",
            stop_words=[b"", "ü".encode()],
            **numbers,
            **flags,
        ).request
        assert {name: getattr(request.sampling, name) for name in numbers} == numbers
        assert (request.reuse, request.key, request.stream, request.return_log_probs) == ("exact", "k", True, True)
        assert request.stop_words == ["ü"]
        assert GenerationRequest.unpack(request.pack()) == request

    def test_end_ids(self, preparer: PromptPreparer) -> None:
        user = preparer.tokenizer.token_id("<|user|>")
        assert one_shot(preparer, text_input=b"hi", end_id=5).request.end_ids == [5]
        assert one_shot(preparer, text_input=b"hi", ignore_eos=True).request.end_ids == []
        assert one_shot(preparer, text_input=b"hi", ignore_eos=True, end_id=5).request.end_ids == []
        got = one_shot(preparer, text_input=b"hi", stop_words=[b"<|user|>", b"word"], ignore_eos=True).request
        assert (got.end_ids, got.stop_words) == ([user], ["<|user|>", "word"])

    def test_bad_words_with_and_without_a_space_in_front(self, preparer: PromptPreparer) -> None:
        words = one_shot(preparer, text_input=b"hi", bad_words=[b"agent", b""]).request.bad_words
        assert [preparer.tokenizer.decode(ids) for ids in words] == ["agent", " agent"]

    def test_echo(self, preparer: PromptPreparer) -> None:
        def echo(**fields: Any) -> str:
            return one_shot(preparer, exclude_input_in_output=False, **fields).request.echo

        assert echo(text_input=b"hello there") == "hello there"
        assert echo(input_ids=preparer.tokenizer.encode("hello there").ids) == "hello there"
        assert echo(messages=chat("hello there")) == preparer.template.render(json.loads(chat("hello there")))

    def test_default_max_tokens_fits_the_room_that_is_left(self, preparer: PromptPreparer) -> None:
        got = one_shot(preparer, input_ids=np.full(LIMIT - 3, 20, np.int32))
        assert got.request.sampling.max_tokens == 3


BAD = [
    ({}, "the prompt must be given as exactly one of text_input, messages, input_ids; this request has none"),
    (
        {"text_input": b"x", "input_ids": np.array([20], np.int32)},
        "exactly one of text_input, messages, input_ids; this request has text_input and input_ids",
    ),
    ({"text_input": b""}, "the prompt is empty (text_input)"),
    ({"input_ids": np.array([], np.int32)}, "the prompt is empty (input_ids)"),
    ({"messages": b"[]"}, "messages is an empty list"),
    ({"messages": b""}, "messages is not valid JSON"),
    ({"messages": b"{not json"}, "messages is not valid JSON: Expecting property name"),
    ({"messages": b'[{"role": "user"}]'}, 'messages[0]["content"] is missing'),
    (
        {"messages": b'[{"role": "user", "content": "\\ud800"}]'},
        "messages or tools hold U+D800, one half of a surrogate pair",
    ),
    ({"text_input": b"x", "tools": b"[]"}, "tools go with messages; this request has text_input"),
    ({"messages": chat("x"), "tools": b"[1]"}, "tools[0] is a number; it must be an object"),
    ({"text_input": b"ab\xffcd"}, "text_input is not valid UTF-8: byte 0xff at offset 2"),
    ({"messages": b'[{"role": "user", "content": "\xe9"}]'}, "messages is not valid UTF-8: byte 0xe9 at offset 30"),
    ({"text_input": b"x", "stop_words": [b"a", b"\x80"]}, "stop_words[1] is not valid UTF-8: byte 0x80 at offset 0"),
    ({"text_input": b"x", "cache_salt": b"\xff"}, "cache_salt is not valid UTF-8"),
    ({"text_input": b"x", "cache_salt": b""}, "cache_salt is empty"),
    ({"text_input": b"x" * 20_001}, "text_input is 20001 bytes long; this server takes at most 20000"),
    ({"text_input": b"x" * 10_000_000}, "text_input is 10000000 bytes long; this server takes at most 20000"),
    ({"messages": chat("x" * 19_000), "tools": b"[" + b" " * 1000 + b"]"}, "this server takes at most 20000"),
    ({"input_ids": np.array([5, 8192], np.int32)}, "input_ids[1] is 8192; the model's ids go from 0 to 8191"),
    ({"input_ids": np.array([-1], np.int32)}, "input_ids[0] is -1; the model's ids go from 0 to 8191"),
    ({"input_ids": np.array([2**32 + 5])}, "input_ids[0] is 4294967301; the model's ids go from 0 to 8191"),
    ({"input_ids": np.array([[5]], np.int32)}, "input_ids has shape [1, 1] and type int32"),
    ({"input_ids": np.array([0.5])}, "input_ids has shape [1] and type float64"),
    (
        {"input_ids": np.full(480, 20, np.int32), "max_tokens": 21},
        "the prompt has 480 tokens and max_tokens is 21, together 501; the model's limit is 500; "
        "max_tokens can be at most 20 here",
    ),
    (
        {"input_ids": np.full(500, 20, np.int32)},
        "the prompt has 500 tokens and max_tokens is 1, together 501; the model's limit is 500; shorten the prompt",
    ),
    ({"text_input": b"x", "max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"text_input": b"x", "max_tokens": -5}, "max_tokens is -5; it must be at least 1"),
    ({"text_input": b"x", "temperature": -0.5}, "temperature is -0.5; it must be between 0 and 100"),
    ({"text_input": b"x", "temperature": float("nan")}, "temperature is nan; it must be between 0 and 100"),
    ({"text_input": b"x", "temperature": float("inf")}, "temperature is inf; it must be between 0 and 100"),
    ({"text_input": b"x", "top_k": -1}, "top_k is -1; it must be at least 0"),
    ({"text_input": b"x", "top_p": 0.0}, "top_p is 0.0; it must be over 0 and at most 1"),
    ({"text_input": b"x", "top_p": 1.5}, "top_p is 1.5; it must be over 0 and at most 1"),
    ({"text_input": b"x", "top_p": float("nan")}, "top_p is nan"),
    ({"text_input": b"x", "min_p": -0.25}, "min_p is -0.25; it must be between 0 and 1"),
    ({"text_input": b"x", "repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be between 0.1 and 10"),
    ({"text_input": b"x", "repetition_penalty": 1e-38}, "repetition_penalty is 1e-38; it must be between 0.1 and 10"),
    ({"text_input": b"x", "repetition_penalty": 1e38}, "repetition_penalty is 1e+38"),
    ({"text_input": b"x", "presence_penalty": float("-inf")}, "presence_penalty is -inf; it must be between -2 and 2"),
    ({"text_input": b"x", "presence_penalty": 3e38}, "presence_penalty is 3e+38"),
    ({"text_input": b"x", "frequency_penalty": -3e38}, "frequency_penalty is -3e+38; it must be between -2 and 2"),
    ({"text_input": b"x", "seed": -1}, "seed is -1; it must be between 0 and 18446744073709551615"),
    ({"text_input": b"x", "seed": 2**64}, "seed is 18446744073709551616; it must be between"),
    ({"text_input": b"x", "end_id": 8192}, "end_id is 8192; the model's ids go from 0 to 8191"),
    ({"text_input": b"x", "end_id": -1}, "end_id is -1; the model's ids go from 0 to 8191 (for no end id at all set"),
    ({"text_input": b"x", "reuse": b"prefix"}, "reuse is 'prefix'; it must be one of off, exact, content"),
    ({"text_input": b"x", "stop_words": [b"a"] * 257}, "stop_words has 257 entries; at most 256 are allowed"),
    ({"text_input": b"x", "bad_words": [b"a" * 1025]}, "bad_words[0] is 1025 bytes long; at most 1024 are allowed"),
    ({"text_input": b"x", "stop_words": b"a"}, "stop_words must be a list of texts, not bytes"),
    ({"text_input": 5}, "text_input must be text in UTF-8, not int"),
    ({"text_input": b"x", "stream": 1}, "stream is 1; it must be true or false"),
    ({"text_input": b"x", "top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
    ({"text_input": b"x", "temperature": b"hot"}, "temperature is b'hot'; it must be a number"),
    ({"text_input": b"x", "temprature": 1.0}, "unknown input 'temprature'; known are"),
]


class TestBadInput:
    @pytest.mark.parametrize(("fields", "said"), BAD, ids=[said[:60] for _, said in BAD])
    def test_says_what_is_wrong_and_leaves_the_session(
        self, preparer: PromptPreparer, fields: dict[str, Any], said: str
    ) -> None:
        """As the first request of a session, in its middle, and as its last."""
        for start, end in ((True, False), (False, False), (False, True)):
            with pytest.raises(InvalidRequestError) as error:
                preparer.prepare(fields, "s", start, end)
            assert said in str(error.value)
            assert len(str(error.value)) < 600
            if not end:
                assert len(preparer.prepare({"text_input": b"still open"}, "s", False, False).token_ids)
        with pytest.raises(SessionError, match="unknown or expired"):
            preparer.prepare({"text_input": b"x"}, "s", False, False)

    def test_session_errors(self, preparer: PromptPreparer) -> None:
        fields = {"text_input": b"x"}
        with pytest.raises(SessionError, match="the session id is 129 bytes long, at most 128"):
            preparer.prepare(fields, "x" * 129, True, False)
        with pytest.raises(SessionError, match=r"'s' is unknown or expired \(idle limit 600 s\); .* START flag"):
            preparer.prepare(fields, "s", False, False)
        preparer.prepare(fields, "s", True, False)
        with pytest.raises(SessionError, match="'s' is already open"):
            preparer.prepare(fields, "s", True, False)
        preparer.prepare(fields, "s", False, False)

    def test_a_late_request_is_told_how_to_go_on(self, folder: Path) -> None:
        now = 0.0
        preparer = PromptPreparer(ServerConfig(model=str(folder), session_ttl_s=30), clock=lambda: now)
        preparer.prepare({"text_input": b"x"}, "s", True, False)
        now = 31.0
        with pytest.raises(SessionError, match=r"expired \(idle limit 30 s\); send the request again with the START"):
            preparer.prepare({"text_input": b"x"}, "s", False, False)
        preparer.prepare({"text_input": b"x"}, "s", True, False)


class TestModelFolder:
    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_missing_file_is_named(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(UnsupportedModelError, match=f"{name} is missing"):
            PromptPreparer(ServerConfig(model=str(folder)))

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("vocab_size", ..., "is missing; it must be an integer, at least 1"),
            ("vocab_size", "many", "is 'many'; it must be an integer, at least 1"),
            ("max_position_embeddings", 0, "is 0; it must be an integer, at least 1"),
        ],
    )
    def test_a_bad_limit_is_named(self, folder: Path, field: str, value: Any, said: str) -> None:
        change_config(folder, **{field: value})
        with pytest.raises(UnsupportedModelError) as error:
            PromptPreparer(ServerConfig(model=str(folder)))
        assert str(error.value) == f"{folder / 'config.json'}: {field} {said}"

    def test_a_tokenizer_of_another_model(self, folder: Path) -> None:
        change_config(folder, vocab_size=1000)
        with pytest.raises(UnsupportedModelError, match=r"has ids up to 8191, but vocab_size in .* is 1000"):
            PromptPreparer(ServerConfig(model=str(folder)))

    def test_an_unknown_preset(self, folder: Path) -> None:
        with pytest.raises(ServerStartError, match=r"IRMINSUL_PRESET='big' is unknown; .*'default', 'grams', 'paper'"):
            PromptPreparer(ServerConfig(model=str(folder), preset="big"))


def test_the_chunker_process_needs_no_torch() -> None:
    program = (
        "import sys; from irminsul_backend.config import ServerConfig; "
        "from irminsul_backend.frontend.chunker import PromptPreparer; "
        "PromptPreparer(ServerConfig()).prepare({'text_input': b'hi'}, 's', True, True); "
        "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


class TestCutMarker:
    """An author's marker forces a cut and is gone before the model sees the prompt."""

    @pytest.mark.parametrize("preset", ["default", "paper"])
    def test_what_it_encloses_is_a_unit_wherever_it_stands(self, preset: str) -> None:
        preparer = PromptPreparer(ServerConfig(preset=preset))
        region = "Shared facts: " + "the harbour opens at six and the ferry leaves at seven. " * 3
        found = []
        for before, after in (
            ("One more thing, said at some length. " * 9, " Ask."),
            ("Another beginning. " * 12, "?"),
        ):
            marked = one_shot(preparer, text_input=f"{before}{CUT_MARKER}{region}{CUT_MARKER}{after}".encode())
            assert preparer.tokenizer.decode(marked.token_ids) == before + region + after
            found.append(set(marked.fingerprints.tolist()))
        assert found[0] & found[1]

    def test_it_works_in_messages_and_is_not_echoed(self, preparer: PromptPreparer) -> None:
        marked = one_shot(
            preparer, messages=chat("some words " * 20 + CUT_MARKER + "and others"), exclude_input_in_output=False
        )
        plain = one_shot(preparer, messages=chat("some words " * 20 + "and others"), exclude_input_in_output=False)
        assert marked.request.echo == plain.request.echo
        assert preparer.tokenizer.decode(marked.token_ids) == preparer.tokenizer.decode(plain.token_ids)

    def test_a_prompt_of_markers_only_is_empty(self, preparer: PromptPreparer) -> None:
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            one_shot(preparer, text_input=CUT_MARKER.encode() * 3)
