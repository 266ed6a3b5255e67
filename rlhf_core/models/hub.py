"""Whether the hub answers, found out at once: its clients retry each file for half a minute."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import UserInputError
from ..util.bounded_thread import BoundedThread
from .config_check import check_layers

_SECONDS = 5.0
"""Deadline of the first answer, name resolution included."""


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
        check_answer(path, where=where)
    check_layers(Path(path), where, fetch=True)


def check_answer(name: str, *, where: str) -> None:
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
