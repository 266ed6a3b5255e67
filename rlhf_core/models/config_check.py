"""Checks a model folder's `config.json` before transformers allocates what it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserInputError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_MAX_LAYERS = 2_000
"""More than any published model has; a model without weights of so many still takes seconds to build."""


def config_of(path: str) -> Mapping[str, Any]:
    """The `config.json` of a folder; empty without one, or with one that `check_layers` reports."""
    try:
        config = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def check_layers(path: Path, where: str, *, fetch: bool = False) -> None:
    """Check the layer counts of a model's `config.json`, of all its parts; of an adapter's base for an adapter.

    path: a folder, or a hub name, whose file is read from the cache, or with `fetch` from the hub. A model without a
    file passes.

    Raises `UserInputError`: a count is negative or too large, or the file cannot be read.
    """
    if isinstance(adapter := _read(path / "adapter_config.json", where), dict):
        path = Path(str(adapter.get("base_model_name_or_path")))
    left = [_read(path / "config.json" if path.exists() else _hub_file(str(path), fetch), where)]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        left += part.values()
        for key in _LAYERS:
            count = part.get(key, 0)
            if isinstance(count, int | float) and not 0 <= count <= _MAX_LAYERS:
                raise UserInputError(
                    f"its config.json has {key}: {count}, and a model has between 0 and {_MAX_LAYERS:,} layers",
                    where=f"{where} {path}",
                    hint="get the model's own config.json",
                )


def _read(file: Path, where: str) -> Any:
    """The value of a JSON file; None if there is no file."""
    try:
        return json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"its {file.name} cannot be read: {error}", where=f"{where} {file.parent}") from error


def _hub_file(name: str, fetch: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with suppress(Exception):  # reported when the model is loaded
        found = try_to_load_from_cache(name, "config.json")
        if fetch and not isinstance(found, str):
            found = hf_hub_download(name, "config.json")
        if isinstance(found, str):
            return Path(found)
    return Path(name)  # which does not exist
