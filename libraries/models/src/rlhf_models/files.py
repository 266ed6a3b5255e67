"""Checks of a model's files before transformers reads them: its name, whether the hub answers, the number of layers.

The hub's clients retry each file for half a minute, and transformers allocates what a `config.json` describes.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserInputError
from rlhf_core.util.bounded_thread import BoundedThread

_SECONDS = 5.0
"""Deadline of the first answer, name resolution included."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_MAX_LAYERS = 2_000
"""More than any published model has; a model without weights of so many still takes seconds to build."""


def check_name(path: str, *, where: str) -> None:
    """Raise `UserInputError` if `path` is not a folder here and cannot be a hub name."""
    if not os.path.exists(path) and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        hint = "check the path, or give a hub name: OWNER/NAME"
        raise UserInputError(f"there is no folder {path!r}", where=where, hint=hint)


def check_hub(path: str, *, where: str) -> None:
    """Check a model's folder or hub name before transformers reads its files.

    Raises `UserInputError`: its files are neither here nor in the cache, and the hub does not answer; or no model has
    the number of layers in its `config.json`.
    """
    check_name(path, where=where)
    from huggingface_hub import try_to_load_from_cache

    if not os.path.exists(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):
        check_hub_reachable(path, where=where)
    check_layers(Path(path), where, fetch=True)


def check_hub_reachable(name: str, *, where: str) -> None:
    """Raise `UserInputError` if the hub, which is needed for `name`, does not answer. In offline mode do nothing."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    answers: list[int] = []
    probe = BoundedThread(_ask, "hub probe", (answers,))
    probe.start()
    probe.join(_SECONDS)
    if not answers:
        raise UserInputError(
            f"{name!r} is neither a folder here nor in the cache, and {constants.ENDPOINT} does not answer",
            where=where,
            hint="give a folder that is on this machine, or check the network",
        )


def _ask(answers: list[int]) -> None:
    """Append the status of any answer; the hub's own session also uses the machine's proxies."""
    from huggingface_hub import constants, get_session

    with suppress(Exception):  # those of its HTTP library
        answers.append(get_session().head(constants.ENDPOINT, timeout=_SECONDS).status_code)


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
