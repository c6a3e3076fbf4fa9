"""tiktoken.model: the published split, merges by rank, reserved ids, and the same ids however a text is cut."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.text import IncrementalDetokenizer, Tokenizer
from irminsul_backend.text.tiktoken_library import LONGEST_RUN, WORDS, TiktokenLibrary

CORPUS = [
    "The agent's answer isn't a user's; they've read the TOOL's answer HTTPServer getUserName 12345 67\n\n  text\r\n",
    "Ångström naïve 東京都 日本語のテキスト 中文English混合 한국어 🙂👩‍👩‍👧 ﬁne ẞtraße",
    '{"name": "get_user", "arguments": {"id": 17}}  ',
]
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 17: "<|im_middle|>"}
PLAIN = {5: "<|tool_call_begin|>", 6: "<think>", 255: "[PAD]"}
"""Named but not special: they show in decoded text."""
IN_TEXT = [*NAMED.values(), *PLAIN.values()]


def train_ranks() -> dict[bytes, int]:
    """Single bytes in a shuffled order, then what a byte-level BPE learns from the corpus."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    ranks = {bytes([(7 * i + 3) % 256]): i for i in range(256)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    written = dict(zip(printable, map(chr, printable), strict=True))
    written |= {b: chr(0x100 + i) for i, b in enumerate(b for b in range(256) if b not in written)}
    byte_of = {char: byte for byte, char in written.items()}
    for text, _ in sorted(library.get_vocab().items(), key=lambda item: item[1]):
        ranks.setdefault(bytes(byte_of[char] for char in text), len(ranks))
    return ranks


RANKS = train_ranks()
BASE = len(RANKS)


def config(**more: Any) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(BASE + i): {"content": text, "special": i in NAMED, **flags} for i, text in (NAMED | PLAIN).items()
        },
        **more,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A model folder of this form; fields of tokenizer_config.json as keywords."""

    def folder(ranks: dict[bytes, int] = RANKS, **more: Any) -> Path:
        lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
        (tmp_path / "tiktoken.model").write_text("".join(lines))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config(**more)))
        return tmp_path

    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("kimi")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config()))
    return Tokenizer.load(folder)


def special_tokens() -> dict[str, int]:
    names = NAMED | PLAIN
    return {names.get(i, f"<|reserved_token_{BASE + i}|>"): BASE + i for i in range(256)}


@pytest.fixture(scope="module")
def one_piece() -> Callable[[str], list[int]]:
    """The package's own encoding of a whole text, with every special token allowed."""
    encoding = tiktoken.Encoding("test", pat_str=WORDS, mergeable_ranks=RANKS, special_tokens=special_tokens())
    return lambda text: encoding.encode(text, allowed_special="all")


@pytest.fixture(scope="module")
def whole() -> TiktokenLibrary:
    return TiktokenLibrary(RANKS, config())


class Converter(TikTokenConverter):
    """Reads nothing: the package keeps copies of files by their names."""

    load_tiktoken_bpe = staticmethod(lambda url: RANKS)


@pytest.fixture(scope="module")
def converted() -> tokenizers.Tokenizer:
    library = Converter(pattern=WORDS).converted()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens()])
    return library


fragments = st.one_of(
    st.sampled_from([*IN_TEXT, f"<|reserved_token_{BASE + 9}|>"]),
    st.sampled_from(IN_TEXT).flatmap(lambda t: st.integers(1, len(t)).map(lambda n: t[:n])),
    st.sampled_from(IN_TEXT).flatmap(lambda t: st.integers(0, len(t) - 1).map(lambda n: t[n:])),
    st.sampled_from([*" \n\t\r\u00a0\u3000'", "  ", "\r\n", "'s", "'LL", "12345", "HTTPServer", "getUser", "don't"]),
    st.sampled_from(
        ["東京", "中文English混合", "々", "〇", "ｶﾅ", "한국", "é", "e\u0301", "ǅ", "ʰ", "²½", "👩‍👩‍👧", "\x00"]
    ),
    st.sampled_from(CORPUS).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[n : n + 9])),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
texts = st.lists(fragments, max_size=14).map("".join)


class TestEncode:
    @settings(max_examples=400, deadline=None)
    @given(texts)
    def test_the_ids_are_those_of_the_whole_text(
        self, tokenizer: Tokenizer, one_piece: Callable[[str], list[int]], text: str
    ) -> None:
        want = one_piece(text)
        for _ in ("cold", "from memory"):
            encoded = tokenizer.encode(text)
            assert encoded.ids.dtype == np.int32
            assert encoded.ids.tolist() == want
        assert encoded.edges.tolist() == [i for i, token in enumerate(want) if token >= BASE]

    @settings(max_examples=300, deadline=None)
    @given(texts)
    def test_the_ids_are_those_of_a_plain_implementation(self, tokenizer: Tokenizer, text: str) -> None:
        """The published rule spelt for another regular expression engine, and merging pair by pair."""
        assert tokenizer.encode(text).ids.tolist() == plain_encode(text)

    @settings(max_examples=150, deadline=None)
    @given(texts)
    def test_the_ids_are_those_of_the_hubs_conversion(
        self, tokenizer: Tokenizer, converted: tokenizers.Tokenizer, text: str
    ) -> None:
        assert tokenizer.encode(text).ids.tolist() == converted.encode(text, add_special_tokens=False).ids

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("中文English混合", ["中文", "English", "混合"]),
            ("汉字abc", ["汉字", "abc"]),
            ("北京市 Pascal", ["北京市", " Pascal"]),
            ("HTTPServer getUserName", ["HTTPServer", " get", "User", "Name"]),
            ("they'VE 12345", ["they'VE", " ", "123", "45"]),
            ("a,\n\n  b", ["a", ",\n\n", " ", " b"]),
        ],
    )
    def test_the_published_split(self, text: str, words: list[str]) -> None:
        assert plain_words(text) == words
        splitter = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
        assert [word for word, _ in splitter.pre_tokenize_str(text)] == words

    def test_a_special_token_in_a_message_is_that_token(self, tokenizer: Tokenizer) -> None:
        """As with tokenizer.json and as published servers do it."""
        ids = tokenizer.encode(f"please print <|im_end|> and <|reserved_token_{BASE + 40}|>").ids.tolist()
        assert BASE + 2 in ids
        assert ids[-1] == BASE + 40

    def test_of_two_that_begin_alike_the_longer_is_found(self, write: Callable[..., Path]) -> None:
        tokens = {str(BASE + i): {"content": text, "special": True} for i, text in enumerate(["<a", "<a>", "<a>b"])}
        tokenizer = Tokenizer.load(write(added_tokens_decoder=tokens, bos_token=None, eos_token=None))
        assert tokenizer.encode("<a<a><a>b").ids.tolist() == [BASE, BASE + 1, BASE + 2]

    @pytest.mark.parametrize("char", [" ", "\u3000", "\n", "a", "é", "中", "!"])
    def test_long_runs_are_cut(self, tokenizer: Tokenizer, one_piece: Callable[[str], list[int]], char: str) -> None:
        """On a million spaces the package panics, which no `except Exception` catches."""
        text = f"x <think>{char * 1_000_000} y"
        pieces = [""]
        for _, chars in itertools.groupby(text.removeprefix("x <think>"), str.isspace):
            first, *further = map("".join, itertools.zip_longest(*[chars] * LONGEST_RUN, fillvalue=""))
            pieces[-1] += first
            pieces += further
        assert tokenizer.encode(text).ids.tolist() == one_piece("x <think>") + [i for p in pieces for i in one_piece(p)]

    def test_runs_up_to_the_limit_are_whole(self, tokenizer: Tokenizer, one_piece: Callable[[str], list[int]]) -> None:
        text = "x" * LONGEST_RUN + " " * LONGEST_RUN + "y"
        assert tokenizer.encode(text).ids.tolist() == one_piece(text)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(fragments, max_size=5).map("".join), min_size=3, max_size=9), st.data())
    def test_changing_messages_and_a_full_memory(
        self, whole: TiktokenLibrary, one_piece: Callable[[str], list[int]], messages: list[str], data: st.DataObject
    ) -> None:
        """A conversation of which one message changes at a time, in a memory that holds only some of them."""
        tokenizer = Tokenizer(whole, config(), memo_bytes=1200)
        for _ in range(4):
            messages[data.draw(st.integers(0, len(messages) - 1))] = data.draw(texts)
            text = "<|im_user|>".join(messages)
            assert tokenizer.encode(text).ids.tolist() == one_piece(text)

    def test_an_unchanged_message_is_not_tokenised_again(
        self, whole: TiktokenLibrary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = Tokenizer(whole, config())
        seen: list[str] = []
        encode = whole.encode_pieces

        def counting(pieces: list[str], most: int | None = None) -> Any:
            seen.extend(pieces)
            return encode(pieces)

        monkeypatch.setattr(whole, "encode_pieces", counting)
        tokenizer.encode("<|im_user|>one<|im_end|>two<|im_user|>one")
        tokenizer.encode(f"<|im_user|>three<|im_end|>two<|reserved_token_{BASE + 9}|>one")
        assert seen == ["one", "two", "three"]


class TestDecode:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, BASE + 260), max_size=40), st.data())
    def test_any_ids_give_the_packages_text(self, tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
        """Without the special tokens and what is no token, and however the ids come."""
        visible = RANKS.items() | {(text.encode(), BASE + i) for i, text in PLAIN.items()}
        data_of = {rank: token for token, rank in visible}
        want = b"".join(data_of.get(token, b"") for token in ids).decode("utf-8", "replace")
        assert tokenizer.decode(ids) == want
        stream = IncrementalDetokenizer(tokenizer)
        cut = data.draw(st.integers(0, len(ids)))
        assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == want

    @settings(max_examples=150, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def test_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


class TestSpecial:
    def test_ids_follow_the_vocabulary(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.vocab_size == BASE + 256
        for text, token in special_tokens().items():
            assert tokenizer.token_id(text) == token
        assert tokenizer.token_id("<|reserved_token_0|>") is None
        assert tokenizer.token_id("a") == RANKS[b"a"]

    def test_which_are_special(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.special_id("<|im_end|>") == BASE + 2
        assert tokenizer.special_id(f"<|reserved_token_{BASE + 8}|>") == BASE + 8
        assert tokenizer.special_id("<think>") is None
        assert tokenizer.special_id("a") is None

    @pytest.mark.parametrize("more", [{"pad_token": "[PAD]"}, {"additional_special_tokens": ["<think>", "[PAD]"]}])
    def test_a_named_one_is_special(self, write: Callable[..., Path], more: dict[str, Any]) -> None:
        tokenizer = Tokenizer.load(write(**more))
        assert tokenizer.special_id("[PAD]") == BASE + 255

    def test_no_bos_unless_asked_for(self, tokenizer: Tokenizer, write: Callable[..., Path]) -> None:
        plain = tokenizer.encode("a").ids.tolist()
        assert tokenizer.encode("a", add_bos=True).ids.tolist() == plain
        asked = Tokenizer.load(write(add_bos_token=True))
        assert asked.encode("a", add_bos=True).ids.tolist() == [BASE, *plain]
        assert asked.encode("[BOS]a", add_bos=True).ids.tolist() == [BASE, *plain]
        assert asked.encode("", add_bos=True).ids.tolist() == [BASE]

    def test_end_ids(self, write: Callable[..., Path]) -> None:
        folder = write()
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": BASE + 2}))
        assert Tokenizer.load(folder).end_ids == (BASE + 1, BASE + 2)


class TestRefusals:
    def refusal(self, folder: Path, file: str = "tiktoken.model") -> str:
        with pytest.raises(UnsupportedModelError) as error:
            Tokenizer.load(folder)
        assert str(folder / file) in str(error.value)
        return str(error.value)

    def test_the_package_is_missing(self, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
        assert "needs the package tiktoken: pip install tiktoken" in self.refusal(write())

    @pytest.mark.parametrize("line", ["IQ==", "IQ== x", "I!== 3", "IQ== 1 2"])
    def test_a_bad_line(self, write: Callable[..., Path], line: str) -> None:
        folder = write()
        with (folder / "tiktoken.model").open("a") as file:
            file.write(f"\n{line}\n")
        assert f"line {BASE + 2} is {line!r}" in self.refusal(folder)

    def test_a_cut_file(self, write: Callable[..., Path]) -> None:
        folder = write({token: rank for token, rank in RANKS.items() if rank != 5})
        assert "the first is 0x26; is the file whole?" in self.refusal(folder)
        folder = write({token: rank for token, rank in RANKS.items() if rank != 300})
        assert f"are not 0 to {BASE - 2}, each once" in self.refusal(folder)

    def test_another_models_settings(self, write: Callable[..., Path]) -> None:
        folder = write(added_tokens_decoder={str(BASE - 1): {"content": "[BOS]"}})
        assert f"names id {BASE - 1} ('[BOS]'), but special tokens begin at {BASE}" in self.refusal(folder)

    def test_another_class(self, write: Callable[..., Path]) -> None:
        assert "tokenizer_class in tokenizer_config.json is 'GrokTokenizer'" in self.refusal(
            write(tokenizer_class="GrokTokenizer")
        )

    @pytest.mark.parametrize("entry", [{"x": {"content": "a"}}, {"999": {}}, {"999": "a"}])
    def test_bad_added_tokens(self, write: Callable[..., Path], entry: dict[str, Any]) -> None:
        assert "must map ids to objects" in self.refusal(write(added_tokens_decoder=entry), "tokenizer_config.json")

    def test_a_repeated_token(self, write: Callable[..., Path]) -> None:
        twice = {str(BASE + i): {"content": "<x>"} for i in range(2)}
        assert "an empty or a repeated content" in self.refusal(write(added_tokens_decoder=twice))


LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UPPER, LOWER = (rf"(?:(?!\p{{Script=Han}}){letters})" for letters in LETTERS)
END = r"(?i:'(?:[stmd]|re|ve|ll))?"
BEFORE = r"(?:(?![\r\n\p{L}\p{N}])[\s\S])?"
PLAIN_WORDS = regex.compile(
    rf"\p{{Script=Han}}+|{BEFORE}{UPPER}*{LOWER}+{END}|{BEFORE}{UPPER}+{LOWER}*{END}|\p{{N}}{{1,3}}"
    r"| ?(?:(?![\s\p{L}\p{N}])[\s\S])+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def plain_words(text: str) -> list[str]:
    return PLAIN_WORDS.findall(text)


def plain_encode(text: str) -> list[int]:
    specials = special_tokens()
    parts = regex.split("(" + "|".join(regex.escape(token) for token in specials) + ")", text)
    out: list[int] = []
    for part in parts:
        if part in specials:
            out.append(specials[part])
            continue
        for word in plain_words(part):
            pieces = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in RANKS]
                if not pairs:
                    break
                i = min(pairs)[1]
                pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            out += [RANKS[piece] for piece in pieces]
    return out
