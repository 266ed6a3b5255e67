"""Values of a run file that may be published: no paths of a machine, no texts, no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-z]{1,20}[0-9]{0,3}([_+-]+[a-z0-9]{1,16}){0,6}")
"""Values such as `token-mean` or `k3`. Keys and passwords usually contain capital letters or longer numbers."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_.-]{1,96}")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt|gz|zst)$")
_FROM_FILE = re.compile(r"(?P<file>[^/\\]+\.py):(?P<name>\w+)$")


def public_options(value: Any) -> Any:
    """Return the numbers, booleans and names in a value of a run file, nested ones included. None if none remain.

    Texts with spaces or slashes may be paths, prompts or addresses, and are left out.

    Example:
        >>> public_options({"name": "model", "path": "/data/me/reward", "weight": 0.5, "url": "http://10.0.0.7/"})
        {'name': 'model', 'weight': 0.5}
        >>> public_options({"kl_in": "loss", "user": "hf_aBcDeFg123", "lora": {"target_modules": ["q_proj"]}})
        {'kl_in': 'loss', 'lora': {'target_modules': ['q_proj']}}
    """
    if isinstance(value, Mapping):
        kept = {str(key): public_options(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each is not None} or None
    if isinstance(value, list | tuple):
        return [each for each in map(public_options, value) if each is not None] or None
    if isinstance(value, str):
        return plugin_name(value) if _FROM_FILE.search(value) else value if _NAME.fullmatch(value) else None
    return value if isinstance(value, bool | int | float) else None


def plugin_name(name: str) -> str:
    """Return the name of a plugin without the folder of its file.

    Example:
        >>> plugin_name("grpo"), plugin_name("/data/me/code/my_reward.py:brevity")
        ('grpo', 'my_reward.py:brevity')
    """
    found = _FROM_FILE.search(name)
    return name if found is None else f"{found['file']}:{found['name']}"


def hub_name(path: str, folder: str | None) -> str | None:
    """Return the hub name in `model.path` or a dataset's `path`, or None if it is a path on this machine.

    Args:
        path: the value in the run file.
        folder: the folder in which the run was started, to which a local path is relative.

    Example:
        >>> hub_name("Qwen/Qwen3-0.6B", None), hub_name("./Qwen/Qwen3", None), hub_name("data/elsewhere.jsonl", None)
        ('Qwen/Qwen3-0.6B', None, None)
    """
    is_here = Path(path).exists() or (folder is not None and Path(folder, path).exists())
    is_name = _HUB_NAME.fullmatch(path) and ".." not in path and not _DATA_FILE.search(path)
    return path if is_name and not is_here else None


def last_part(path: str) -> str:
    """Return the last part of a path, and for the folder `model` of a run also the run's name.

    Example:
        >>> last_part("/data/me/data/prompts.jsonl"), last_part("/data/me/runs/first/model/"), last_part("builtin:tiny")
        ('prompts.jsonl', 'first/model', 'builtin:tiny')
    """
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..")]
    return "/".join(parts[-2:] if parts[-1:] in (["model"], ["adapter"]) else parts[-1:])
