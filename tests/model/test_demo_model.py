"""The shipped model: small, loadable, it answers from its prompt; its tokenizer and template do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from irminsul_traffic.agent_text import AgentText
from irminsul_traffic.facts import NeedleMaker
from safetensors.torch import load_file
from tokenizers import Tokenizer

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.model import MLAModel, load_model
from irminsul_backend.model.attention import DenseContext
from irminsul_backend.training.train import write_model
from irminsul_backend.training.train_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE


@pytest.fixture(scope="module")
def model() -> MLAModel:
    return load_model(DEMO_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def prompt_ids(tokenizer: Tokenizer, seed: int, length: int) -> list[int]:
    text = "\n".join(AgentText(seed).documents(40))
    ids = tokenizer.encode("<|begin|><|user|>" + text).ids[: length - 1]
    return [*ids, tokenizer.token_to_id("<|assistant|>")]


class TestWeights:
    def test_it_is_small_and_has_rows_of_real_size(self, model: MLAModel) -> None:
        assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 20e6
        assert (model.config.kv_lora_rank, model.config.qk_rope_head_dim) == (512, 64)
        assert [model.config.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]

    def test_the_script_writes_exactly_the_shipped_files(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        """All but tokenizer.json, whose corpus is the running interpreter's standard library."""
        weights = load_file(DEMO_MODEL / "model.safetensors")
        write_model(tmp_path, tokenizer, weights)
        assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DEMO_MODEL.iterdir()}
        for path in tmp_path.iterdir():
            if path.name != "tokenizer.json":
                assert path.read_bytes() == (DEMO_MODEL / path.name).read_bytes(), path.name

    def test_transformers_agrees(self, model: MLAModel, tokenizer: Tokenizer) -> None:
        transformers = pytest.importorskip("transformers")
        reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
        ids = torch.tensor(prompt_ids(tokenizer, 1, 200))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0]
        difference = model.logits(ids) - expected
        assert difference.norm() <= 2e-5 * expected.norm()
        assert difference.abs().max() <= 2e-3  # of up to 20; transformers itself is 1e-3 from float64, we 3e-4

    @pytest.mark.parametrize(("hops", "bar"), [(1, 0.9), (2, 0.75)])
    def test_it_answers_from_the_prompt(self, model: MLAModel, tokenizer: Tokenizer, hops: int, bar: float) -> None:
        """40 new prompts of about 700 tokens; a reply is right if the model would say each of its tokens and then end.
        Chance is 1 in 176; `irminsul eval needle` measures with more prompts."""
        maker, right, count = NeedleMaker(f"shipped/{hops}"), 0, 40
        for _ in range(count):
            needle = maker.needle(hops, facts=18, fillers=6)
            prompt = tokenizer.encode(render(messages=needle.messages, add_generation_prompt=True)).ids
            reply = tokenizer.encode(needle.question.reply + "<|end|>").ids
            ids = torch.tensor(prompt + reply[:-1])
            context = DenseContext(model.config, len(ids), model.device)
            hidden = model.forward(ids, torch.arange(len(ids)), context)
            said = model.compute_logits(hidden[len(prompt) - 1 :]).argmax(dim=-1)
            right += said.tolist() == reply
        assert right >= bar * count


class TestTokenizer:
    def test_vocabulary(self, tokenizer: Tokenizer, model: MLAModel) -> None:
        assert tokenizer.get_vocab_size() == VOCAB_SIZE == model.config.vocab_size
        assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
        generation = json.loads((DEMO_MODEL / "generation_config.json").read_text())
        assert generation["eos_token_id"] == tokenizer.token_to_id("<|end|>")

    @pytest.mark.parametrize(
        "text", ["", " ", "a\r\n\n  b\t", "naïve 🦜 日本語 \u0301\u200d", "x" * 999, '{"a": [1, 2.50]}\n']
    )
    def test_any_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_agent_text_is_compressed(self, tokenizer: Tokenizer) -> None:
        text = "\n".join(AgentText(99).documents(50))
        assert len(text) / len(tokenizer.encode(text).ids) > 3


def render(**values: Any) -> str:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string((DEMO_MODEL / "chat_template.jinja").read_text()).render(values)


class TestChatTemplate:
    def test_the_file_is_the_constant(self) -> None:
        assert (DEMO_MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE

    def test_roles_ends_and_generation_prompt(self) -> None:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": " r\n"},
            {"role": "critic", "content": "c"},
            {"role": "assistant", "content": "done"},
        ]
        assert render(messages=messages, add_generation_prompt=True) == (
            '<|begin|><|system|>S<|user|>ab<|assistant|>\n{"arguments": {"x": 1}, "name": "f"}<|end|>'
            "<|tool|> r\n<|role|>critic\nc<|assistant|>done<|end|><|assistant|>"
        )

    def test_tools_stand_behind_the_leading_system_messages(self) -> None:
        tools = [{"name": "f"}, {"name": "g"}]
        shown = '<|tool_schema|>{"name": "f"}<|tool_schema|>{"name": "g"}'
        system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "u"}
        assert render(messages=[system, user], tools=tools) == f"<|begin|><|system|>S{shown}<|user|>u"
        assert render(messages=[user, system, user], tools=tools) == f"<|begin|>{shown}<|user|>u<|system|>S<|user|>u"
        assert render(messages=[system], tools=tools) == f"<|begin|><|system|>S{shown}"

    def test_parts_that_are_no_text_are_refused(self) -> None:
        with pytest.raises(jinja2.TemplateError, match="image_url"):
            render(messages=[{"role": "user", "content": [{"type": "image_url"}]}])
