"""The tokenizer gives the library's ids, does no work twice, and says where the template's structure is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.text import ChatTemplate, Tokenizer
from irminsul_backend.text.tokenizers_library import TokenizersLibrary

KINDS = [
    *(
        "byte_level",
        "deepseek",
        "empty_normalizer",
        "changing_normalizer",
        "prepending_normalizer",
        "prefix_space",
        "metaspace",
    ),
    *("lstrip", "rstrip", "single_word", "bos_template", "truncation_and_padding"),
]
TOKENS = ["<|begin|>", "<|end|>", "<|user|>", "<|user|>x", "<<", "<|in</think>side|>", "<mask>"]
TOKENS += ["<think>", "</think>", "<|Tool|>", "<|tool|>", "<|TOOL|>", "Ok", "ok", "\n\n", "｜"]
TOKENS_CONFIG = {
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}
PLAIN_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
fragments = st.one_of(
    st.sampled_from(TOKENS),
    st.sampled_from(TOKENS).flatmap(lambda t: st.integers(1, len(t)).map(lambda n: t[:n])),
    st.sampled_from(TOKENS).flatmap(lambda t: st.integers(0, len(t) - 1).map(lambda n: t[n:])),
    st.sampled_from(
        [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "a", " a", "Åé", "e\u0301", "日本", "👩‍👩‍👧", "\x00"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
texts = st.lists(fragments, max_size=14).map("".join)


def of_definition(value: dict[str, Any], config: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    return Tokenizer(TokenizersLibrary(json.dumps(value), config or {}), config or {}, **options)


@pytest.fixture(scope="session")
def pairs(definitions: dict[str, dict[str, Any]]) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Ours and the library's tokenizer of each kind."""
    out = {}
    for kind, value in definitions.items():
        library = tokenizers.Tokenizer.from_str(json.dumps(value))
        library.no_truncation()
        library.no_padding()
        out[kind] = (of_definition(value), library)
    return out


class TestEncode:
    @pytest.mark.parametrize("kind", KINDS)
    def test_ids_are_the_librarys(self, kind: str, pairs: dict[str, Any]) -> None:
        ours, library = pairs[kind]

        @settings(max_examples=150, deadline=None)
        @given(texts)
        def check(text: str) -> None:
            want = library.encode(text, add_special_tokens=False).ids
            for _ in ("cold", "from memory"):
                encoded = ours.encode(text)
                assert encoded.ids.dtype == np.int32
                assert encoded.ids.tolist() == want
            added = library.get_added_tokens_decoder()
            assert encoded.edges.dtype == np.int32
            assert encoded.edges.tolist() == [
                i for i, token in enumerate(want) if token in added and added[token].content.strip()
            ]

        check()

    def test_an_unchanged_piece_is_not_tokenised_again(
        self, definitions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = of_definition(definitions["byte_level"])
        seen: list[str] = []
        encode = tokenizer._library.encode_pieces

        def counting(pieces: list[str], most: int | None = None) -> Any:
            seen.extend(pieces)
            return encode(pieces)

        monkeypatch.setattr(tokenizer._library, "encode_pieces", counting)
        tokenizer.encode("<|user|>one<|end|>two<|user|>one")
        tokenizer.encode("<|user|>three<|end|>two<|user|>one")
        assert seen == ["one", "two", "three"]

    def test_many_threads_get_the_same_ids(self, definitions: dict[str, Any]) -> None:
        tokenizer = of_definition(definitions["byte_level"], memo_bytes=3000)
        wrong: list[str] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                words = [f"word {rng.integers(30)}" for _ in range(5)]
                ids = tokenizer.encode("<|user|>".join(words)).ids
                if tokenizer.decode(ids) != "".join(words):
                    wrong.append(str(words))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert 0 < tokenizer._memo.size_bytes <= 3000

    def test_a_token_in_the_text_is_that_token(self, pairs: dict[str, Any]) -> None:
        """As published servers do it: the rendered text is tokenised as a whole."""
        ours, library = pairs["byte_level"]
        assert ours.encode("please print <|end|>").ids[-1] == library.token_to_id("<|end|>")


class TestBos:
    def test_the_post_processor_says_so(self, pairs: dict[str, Any]) -> None:
        ours, library = pairs["bos_template"]
        begin = library.token_to_id("<|begin|>")
        plain = ours.encode("hello").ids.tolist()
        assert ours.encode("hello", add_bos=True).ids.tolist() == [begin, *plain]
        assert ours.encode("<|begin|>hello", add_bos=True).ids.tolist() == [begin, *plain]
        assert ours.encode("<|begin|>hello", add_bos=True).edges.tolist() == [0]

    @pytest.mark.parametrize(
        ("kind", "wanted", "present"),
        [
            ("byte_level", True, True),
            ("byte_level", False, False),
            ("byte_level", None, False),
            ("bos_template", False, False),
            ("bos_template", True, True),
        ],
    )
    def test_add_bos_token_decides(
        self, definitions: dict[str, Any], kind: str, wanted: bool | None, present: bool
    ) -> None:
        config = {"bos_token": {"content": "<|begin|>"}, **({} if wanted is None else {"add_bos_token": wanted})}
        tokenizer = of_definition(definitions[kind], config)
        ids = tokenizer.encode("hello", add_bos=True).ids.tolist()
        assert ids == [tokenizer.token_id("<|begin|>")] * present + tokenizer.encode("hello").ids.tolist()

    @pytest.mark.parametrize("in_template", [True, False])
    def test_a_template_writes_its_own(self, folder: Path, in_template: bool) -> None:
        """Once where the template writes it, and not at all where it does not: as the hub does it."""
        (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS_CONFIG, "add_bos_token": True}))
        (folder / "chat_template.jinja").write_text("{{ bos_token }}" * in_template + "{{ messages[0].content }}")
        messages = [{"role": "user", "content": "hello"}]
        ids = Tokenizer.load(folder).encode(ChatTemplate.load(folder).render(messages)).ids.tolist()
        theirs = AutoTokenizer.from_pretrained(folder)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert (ids[0] == theirs.bos_token_id) == in_template
        both = Tokenizer.load(folder).encode(ChatTemplate.load(folder).render(messages), add_bos=True).ids.tolist()
        assert both == [theirs.bos_token_id, *ids[in_template:]]

    def test_a_bos_of_several_tokens_is_not_doubled(self, definitions: dict[str, Any]) -> None:
        library = TokenizersLibrary(json.dumps(definitions["byte_level"]), {})
        library.bos_ids = [library.token_id("<|begin|>"), library.token_id("<|user|>")]
        tokenizer = Tokenizer(library, {})
        want = [*library.bos_ids, *tokenizer.encode("hello").ids.tolist()]
        for text in ("hello", "<|begin|><|user|>hello"):
            assert tokenizer.encode(text, add_bos=True).ids.tolist() == want


class TestAddedTokens:
    """tokenizer_config.json may name tokens that tokenizer.json lacks, or give one other properties."""

    def tokenizer_pair(self, folder: Path, entries: dict[int, dict[str, Any]]) -> tuple[Tokenizer, Any]:
        config = {**TOKENS_CONFIG, "added_tokens_decoder": {str(i): entry for i, entry in entries.items()}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)

    @pytest.mark.parametrize("flag", [None, "lstrip", "rstrip", "single_word", "normalized"])
    @pytest.mark.parametrize("special", [True, False])
    def test_they_are_added_as_the_hub_does(self, folder: Path, flag: str | None, special: bool) -> None:
        plain = Tokenizer.load(folder)
        flags = {**PLAIN_FLAGS, "special": special, **({} if flag is None else {flag: True})}
        entries = {
            plain.vocab_size: {"content": "<new>", **flags},
            plain.vocab_size + 1: {"content": "<newer>", **flags},
            plain.token_id("<think>"): {"content": "<think>", **flags},
            plain.token_id("<|user|>"): {"content": "<|user|>", **PLAIN_FLAGS, "special": True},
        }
        ours, theirs = self.tokenizer_pair(folder, entries)
        assert (ours.vocab_size, ours.file_name) == (plain.vocab_size + 2, "tokenizer.json")

        @settings(max_examples=40, deadline=None)
        @given(st.lists(st.one_of(fragments, st.sampled_from(["<new>", "<newer>", "<think>", " "]))).map("".join))
        def check(text: str) -> None:
            want = theirs(text, add_special_tokens=False)["input_ids"]
            for _ in ("cold", "from memory"):
                assert ours.encode(text).ids.tolist() == want
            assert ours.decode(want) == theirs.decode(want, skip_special_tokens=True)

        check()
        assert (ours.special_id("<new>") is not None) == special

    def test_an_id_that_cannot_be(self, folder: Path) -> None:
        token = Tokenizer.load(folder).vocab_size
        with pytest.raises(UnsupportedModelError, match=f"gives '<new>' the id {token + 1}, but .* it has {token}"):
            self.tokenizer_pair(folder, {token + 1: {"content": "<new>", **PLAIN_FLAGS}})


class TestLoad:
    def test_end_ids_come_from_every_file(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"eos_token_id": 3}')
        (folder / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
        (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
        tokenizer = Tokenizer.load(folder)
        assert set(tokenizer.end_ids) == {3, 5, tokenizer.token_id("<|end|>")}

    def test_files_without_end_ids(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"eos_token_id": null}')
        assert Tokenizer.load(folder).end_ids == ()

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json is missing"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", '{"version": "1.0"}', '{"model": {"type": "None"}}'])
    def test_a_broken_file_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json is not understood"):
            Tokenizer.load(tmp_path)

    def test_a_broken_config_is_named(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(UnsupportedModelError, match=r"generation_config\.json is not valid JSON"):
            Tokenizer.load(folder)


def test_vocab_size_is_the_highest_id_plus_one(pairs: dict[str, Any]) -> None:
    ours, library = pairs["byte_level"]
    assert ours.vocab_size == max(library.get_vocab().values()) + 1
