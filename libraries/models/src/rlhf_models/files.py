"""Checks on a model before transformers reads its files: the name, whether the hub responds, the number of layers.

They fail fast: hub clients retry each file for half a minute, and transformers allocates the model that a
`config.json` describes.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserInputError
from rlhf_core.util.bounded_thread import BoundedThread

_PROBE_SECONDS = 5.0
"""Deadline for the hub's first response, name resolution included."""
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_MAX_LAYERS = 2_000
"""More than any published model has. Even without weights, a model with this many layers takes seconds to build."""


def check_name(path: str, *, where: str) -> None:
    """Raise `UserInputError` if `path` is not a folder here and cannot be a hub name."""
    if not os.path.exists(path) and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        hint = "check the path, or use a hub name: OWNER/NAME"
        raise UserInputError(f"there is no folder {path!r}", where=where, hint=hint)


def check_hub(path: str, *, where: str) -> None:
    """Check a model's folder or hub name before transformers reads its files.

    Args:
        path: a folder, or a hub name (`OWNER/NAME`).
        where: the option that sets the path, for error messages.

    Raises:
        UserInputError: the files are neither local nor cached and the hub does not respond, or the number of layers in
            `config.json` is not plausible.
    """
    check_name(path, where=where)
    from huggingface_hub import try_to_load_from_cache

    if not os.path.exists(path) and not isinstance(try_to_load_from_cache(path, "config.json"), str):
        check_hub_reachable(path, where=where)
    check_layers(Path(path), where, fetch=True)


def check_hub_reachable(name: str, *, where: str) -> None:
    """Check that the hub responds. In offline mode (`HF_HUB_OFFLINE`) do nothing.

    Args:
        name: hub name of the model that is needed, for error messages.
        where: the option that sets the name, for error messages.

    Raises:
        UserInputError: the hub did not respond within 5 seconds.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    statuses: list[int] = []
    probe = BoundedThread(_probe_hub, "hub probe", (statuses,))
    probe.start()
    probe.join(_PROBE_SECONDS)
    if not statuses:
        raise UserInputError(
            f"{name!r} is neither a local folder nor in the cache, and {constants.ENDPOINT} does not answer",
            where=where,
            hint="use a folder on this machine, or check the network",
        )


def _probe_hub(statuses: list[int]) -> None:
    """Append the status of any response. The hub's own session also uses the machine's proxies."""
    from huggingface_hub import constants, get_session

    with suppress(Exception):  # whichever its HTTP library raises
        statuses.append(get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS).status_code)


def check_layers(path: Path, where: str, *, fetch: bool = False) -> None:
    """Check the layer counts in a model's `config.json`, nested configs included. An adapter's base model is checked.

    `path` is a folder or a hub name. A hub name's file is read from the cache, or with `fetch` from the hub. A model
    without the file passes.

    Raises `UserInputError` if a count is negative or too large, or the file cannot be read.
    """
    if isinstance(adapter := _read(path / "adapter_config.json", where), dict):
        path = Path(str(adapter.get("base_model_name_or_path")))
    pending = [_read(path / "config.json" if path.exists() else _hub_file(str(path), fetch), where)]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        pending += part.values()
        for key in _LAYERS:
            count = part.get(key, 0)
            if isinstance(count, int | float) and not 0 <= count <= _MAX_LAYERS:
                raise UserInputError(
                    f"its config.json has {key}: {count}, but a model has between 0 and {_MAX_LAYERS:,} layers",
                    where=f"{where} {path}",
                    hint="get the model's own config.json",
                )


def _read(file: Path, where: str) -> Any:
    """Content of a JSON file, or None if it does not exist."""
    try:
        return json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"its {file.name} cannot be read: {error}", where=f"{where} {file.parent}") from error


def _hub_file(name: str, fetch: bool) -> Path:
    """Cached `config.json` of a hub model, or a path that does not exist."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with suppress(Exception):  # reported when the model is loaded
        file = try_to_load_from_cache(name, "config.json")
        if fetch and not isinstance(file, str):
            file = hf_hub_download(name, "config.json")
        if isinstance(file, str):
            return Path(file)
    return Path(name)
