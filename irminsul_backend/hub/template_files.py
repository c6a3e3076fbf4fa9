"""The chat templates of a model folder, wherever its publisher put them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import read_optional_json, read_text


def read_templates(folder: Path) -> dict[str, str]:
    """Read the Jinja sources by name; empty if the folder has none.

    The first place that holds some counts: chat_template.jinja and additional_chat_templates/NAME.jinja together;
    chat_template in tokenizer_config.json, a template or a list of named ones; the same in chat_template.json.

    Raises:
        UnsupportedModelError: a file is not understood; names it.
    """
    found = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        found["default"] = folder / "chat_template.jinja"
    if found:
        return {name: read_text(path, "it holds a chat template") for name, path in found.items()}
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        source = None if templates else read_optional_json(folder / name).get("chat_template")
        if source is not None:
            templates = _named(folder / name, source)
    return templates


def _named(path: Path, source: Any) -> dict[str, str]:
    """The chat_template field of a JSON file: a string, a list of {"name", "template"}, or an object by name."""
    try:
        named = source if isinstance(source, dict) else {"default": source}
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
        if all(isinstance(text, str) for item in named.items() for text in item):
            return named
    except (KeyError, TypeError):
        pass
    raise UnsupportedModelError(
        f'chat_template in {path} must be a string or a list of objects with a "name" and a "template"'
    )


def sorts_tool_keys(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the model's own tokenizer class sorts the keys of tools before rendering. Only its code says so.

    Args:
        config: the object of tokenizer_config.json.
    """
    classes = config.get("auto_map", {}).get("AutoTokenizer") if isinstance(config.get("auto_map"), dict) else None
    modules = {str(name).split(".")[0] for name in classes or [] if name} if isinstance(classes, list) else set()
    paths = [folder / f"{module}.py" for module in modules]
    return any("deep_sort_dict(tools)" in read_text(path, "") for path in paths if path.exists())
