"""Checks a model folder's `config.json` before transformers allocates what it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def check_layers(folder: Path, where: str) -> None:
    """Check the layer counts of `config.json`, of all its parts. A folder without one passes.

    Raises `UserInputError`: a count is negative or too large, or the file cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        left: list[Any] = [json.loads(path.read_bytes())]
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"its config.json cannot be read: {error}", where=f"{where} {folder}") from error
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
                    where=f"{where} {folder}",
                    hint="get the model's own config.json",
                )
