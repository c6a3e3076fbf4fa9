"""`irminsul inspect`: what a model folder holds and whether it can be served, from the files' headers alone.

No weight is read, so a folder of 600 GB takes a second. Unlike loading, which stops at the first thing that is wrong,
it names all problems at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import read_config
from irminsul_backend.hub.template_files import read_templates
from irminsul_backend.hub.weight_files import LISTED, ModelFolder
from irminsul_backend.model import ModelConfig
from irminsul_backend.model.loading import find_problems, memory_bytes, try_config, unused_fields
from irminsul_backend.model.moe import check_alignment
from irminsul_backend.text import ChatTemplate, Tokenizer

DTYPES = ("float32", "bfloat16", "float16")
GIB = 2**30
POOL_SHARE = 0.8
"""The part that cached rows may take of the memory that the weights leave; the rest is working memory."""


def inspect_folder(folder: str | Path, memory: int | None = None) -> dict[str, Any]:
    """Everything that can be said of a model folder without reading its weights, as JSON values.

    Args:
        memory: bytes that weights and cache may take; None = the first GPU's memory or, without one, this machine's.

    Returns:
        `servable` is True if `problems` is empty. Sizes are in bytes. Parts that cannot be known are missing.
    """
    folder = Path(folder)
    problems: list[str] = []
    notes: list[str] = []
    report: dict[str, Any] = {"model": folder.resolve().name, "servable": False, "problems": problems, "notes": notes}
    report |= _memory(memory)
    if not folder.is_dir():
        wrong_kind = "is a file; give the folder that holds config.json" if folder.exists() else "does not exist"
        problems.append(f"model folder {folder} {wrong_kind}")
        return report
    files = _attempt(problems, lambda: ModelFolder(folder))
    if files is not None:
        report["disk"] = _disk(files)
    raw = _attempt(problems, lambda: read_config(folder))
    config = None
    if raw is not None:
        config, config_problems = try_config(raw)
        problems += [f"config.json: {problem}" for problem in config_problems]
        report["unused_fields"] = unused_fields(raw)
        if config is not None:
            report |= _architecture(config, raw)
            report["serving"] = _serving(config, report["memory_bytes"])
            unaligned = [check_alignment(config, getattr(torch, name)) for name in DTYPES]
            notes += [f"config.json: {problem}" for problem in unaligned if problem]
            if not any(entry["fits"] for entry in report["serving"].values()):
                least = min(entry["weight_bytes"] for entry in report["serving"].values())
                problems.append(
                    f"the weights take {least / GIB:.1f} GiB at least; {report['memory_bytes'] / GIB:.1f} GiB are there"
                )
    if config is not None and files is not None:
        wrong = find_problems(files.tensors, config)
        problems += wrong[:LISTED]
        if len(wrong) > LISTED:
            problems.append(f"{len(wrong) - LISTED} more tensors do not fit config.json")
    report["text"] = _text(folder, config, problems, notes)
    report["servable"] = not problems
    return report


def _attempt(problems: list[str], load: Any) -> Any:
    """What `load` returns, or None with its refusal among `problems`."""
    try:
        return load()
    except UnsupportedModelError as error:
        if str(error) not in problems:  # two parts may read the same file
            problems.append(str(error))
        return None


def _memory(memory: int | None) -> dict[str, Any]:
    if memory is not None:
        return {"memory_bytes": memory, "memory_of": "as given"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {"memory_bytes": properties.total_memory, "memory_of": properties.name}
    return {"memory_bytes": psutil.virtual_memory().total, "memory_of": "this machine's RAM"}


def _disk(files: ModelFolder) -> dict[str, Any]:
    bytes_by_dtype: Counter[str] = Counter()
    for info in files.tensors.values():
        bytes_by_dtype[info.dtype] += info.num_bytes
    return {
        "files": len({info.file for info in files.tensors.values()}),
        "tensors": len(files.tensors),
        "bytes": sum(bytes_by_dtype.values()),
        "bytes_by_dtype": dict(bytes_by_dtype.most_common()),
    }


def _architecture(config: ModelConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    moe = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return {
        "architecture": config.architecture,
        "model_type": raw.get("model_type"),
        "layers": {
            "dense": config.num_layers - moe, "moe": moe, "prediction": config.num_nextn_predict_layers
        },
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "head_dims": {"nope": config.qk_nope_head_dim, "rope": config.qk_rope_head_dim, "value": config.v_head_dim},
        "q_lora_rank": config.q_lora_rank,
        "row": {"latent": config.kv_lora_rank, "rope": config.qk_rope_head_dim},
        "experts": {
            "routed": config.n_routed_experts, "per_token": config.num_experts_per_tok,
            "shared": config.n_shared_experts, "groups": config.n_group, "kept_groups": config.topk_group,
            "routing": config.topk_method,
        },
        "vocabulary": config.vocab_size,
        "tied_embeddings": config.tie_word_embeddings,
        "context_tokens": config.max_position_embeddings,
        "rope": {
            "type": scaling.get("rope_type", scaling.get("type", "default")),
            "theta": scaling.get("rope_theta", raw.get("rope_theta")),
            "factor": scaling.get("factor"),
            "original_context_tokens": scaling.get("original_max_position_embeddings"),
        },
        "float8_block": list(config.weight_block_size) if config.weight_block_size else None,
    }  # fmt: skip


def _serving(config: ModelConfig, memory: int) -> dict[str, Any]:
    """Sizes in each dtype that the server can compute in."""
    serving = {}
    for name in DTYPES:
        itemsize = getattr(torch, name).itemsize
        weights, row = memory_bytes(config, itemsize), config.num_layers * config.row_size * itemsize
        tokens = int((memory - weights) * POOL_SHARE) // row
        serving[name] = {
            "weight_bytes": weights,
            "row_bytes_per_token": row,
            "fits": tokens > 0,
            "tokens_that_fit": max(tokens, 0),
        }
    return serving


def _text(folder: Path, config: ModelConfig | None, problems: list[str], notes: list[str]) -> dict[str, Any]:
    """Tokenizer, chat template and the ids that end a turn."""
    text: dict[str, Any] = {"tokenizer": None, "chat_template": False, "end_ids": []}
    tokenizer = _attempt(problems, lambda: Tokenizer.load(folder))
    if tokenizer is not None:
        text |= {"tokenizer": tokenizer.file_name, "end_ids": list(tokenizer.end_ids)}
        if config is not None and tokenizer.vocab_size > config.vocab_size:
            problems.append(
                f"{tokenizer.file_name} has ids up to {tokenizer.vocab_size - 1}, vocab_size in config.json is "
                f"{config.vocab_size}"
            )
        if config is not None and (beyond := [i for i in tokenizer.end_ids if i >= config.vocab_size]):
            notes.append(
                f"end ids {', '.join(map(str, beyond))} are never generated: vocab_size in config.json is "
                f"{config.vocab_size}"
            )
        if not tokenizer.end_ids:
            notes.append(
                "no file names an end id: answers run to max_tokens unless the request gives end_id or stop words"
            )
    if _attempt(problems, lambda: ChatTemplate.load(folder)) is not None:
        text["chat_template"] = any(read_templates(folder).values())
        if not text["chat_template"]:
            notes.append("no chat template: prompts as text or ids only, requests with messages are refused")
    return text


def render(report: dict[str, Any]) -> str:
    """The report for a person to read."""
    lines = [("model", f"{report['model']}: {'can be served' if report['servable'] else 'CANNOT be served'}")]
    if "architecture" in report:
        lines += _architecture_lines(report)
    if "disk" in report:
        disk = report["disk"]
        dtypes = ", ".join(f"{name} {_size(n)}" for name, n in disk["bytes_by_dtype"].items())
        lines.append(
            ("on disk", f"{_size(disk['bytes'])} in {disk['files']} files, {disk['tensors']:,} tensors ({dtypes})")
        )
    if "text" in report:
        lines.append(("text", _text_line(report["text"])))
    memory = f"{_size(report['memory_bytes'])} ({report['memory_of']})"
    for name, entry in report.get("serving", {}).items():
        fit = f"{entry['tokens_that_fit']:,} tokens fit in {memory}" if entry["fits"] else f"too large for {memory}"
        lines.append(
            (
                name,
                f"weights {_size(entry['weight_bytes'])}, a token's rows {entry['row_bytes_per_token']:,} bytes, {fit}",
            )
        )
    if report.get("unused_fields"):
        unused = ", ".join(f"{name} = {value!r}" for name, value in report["unused_fields"].items())
        lines.append(("not used", f"in config.json: {unused}"))
    lines += [("note", note) for note in report["notes"]]
    lines += [("problem", problem) for problem in report["problems"]]
    return "\n".join(f"{name:<11} {value}" for name, value in lines)


def _text_line(text: dict[str, Any]) -> str:
    template = "chat template found" if text["chat_template"] else "NO chat template"
    ends = f"turns end at {', '.join(map(str, text['end_ids']))}" if text["end_ids"] else "NO end id"
    return f"{text['tokenizer'] or 'NO tokenizer'}, {template}, {ends}"


def _architecture_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    layers, heads, row, rope = (report[name] for name in ("layers", "head_dims", "row", "rope"))
    ahead = f", {layers['prediction']} for prediction (not used)" if layers["prediction"] else ""
    query = f"through {report['q_lora_rank']}" if report["q_lora_rank"] else "in one matrix"
    lines = [
        ("family", f"{report['model_type']}, {report['architecture']}"),
        ("layers", f"{layers['dense']} dense, {layers['moe']} MoE{ahead}; width {report['hidden_size']:,}"),
        (
            "attention",
            f"{report['heads']} heads of {heads['nope']} + {heads['rope']}, values {heads['value']}, queries {query}",
        ),
        ("row", f"{row['latent']} + {row['rope']} elements a layer and token"),
    ]
    experts = report["experts"]
    if experts["routed"]:
        groups = f" from {experts['kept_groups']} of {experts['groups']} groups" if experts["groups"] > 1 else ""
        choice = f"{experts['per_token']} a token{groups} by {experts['routing']}"
        lines.append(("experts", f"{experts['routed']} routed, {choice}; {experts['shared']} shared"))
    tied = ", embedding and head tied" if report["tied_embeddings"] else ""
    scaling = f" x {rope['factor']:g} from {rope['original_context_tokens']:,}" if rope["factor"] else ""
    lines.append(("vocabulary", f"{report['vocabulary']:,}{tied}"))
    lines.append(
        ("context", f"{report['context_tokens']:,} tokens; rope {rope['type']}{scaling}, theta {rope['theta']}")
    )
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 if the folder cannot be served."""
    memory = None if args.memory is None else int(args.memory * GIB)
    report = inspect_folder(args.model_dir, memory)
    try:
        print(json.dumps(report, indent=2, ensure_ascii=False) if args.json else render(report), flush=True)
    except BrokenPipeError:  # the reader, such as head, has enough; what is buffered must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if report["servable"] else 1
